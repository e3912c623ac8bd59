#!/bin/sh
# Makes a key directory out of what Kubernetes mounts, and keeps it so.
#
# Kubernetes shows the files of a Secret to a pod's whole group, and kvbaton refuses a secret that others can read. So they
# are copied, with mode 0400, to a volume in memory that only this pod has. Public keys and ticket keys are looked at every
# 10 s, so that `kvbaton keys rotate` and `remove` reach running pods; a pod's own secret is of its start. Where members join
# (a volume `admission`), tokens are copied when what is mounted changes: between that, their registry counts uses in the copy.
#
#   sync-keys.sh          for ever (the pod's sidecar)
#   sync-keys.sh once     once
set -eu
umask 077
in=${KEYS_IN:-/in}
out=${KEYS_OUT:-/keys}

put() {  # FROM TO: whole or not at all, and only if it differs
    cmp -s "$1" "$2" && return
    cp "$1" "$2.new"
    chmod 400 "$2.new"
    mv -f "$2.new" "$2"
}

sync_once() {
    mkdir -p "$out/public" "$out/secret"
    for file in "$in"/public/*.json "$in"/public/*.signing; do
        [ ! -e "$file" ] || put "$file" "$out/public/${file##*/}"
    done
    for file in "$out"/public/*.json "$out"/public/*.signing; do  # identities that were removed
        [ -e "$in/public/${file##*/}" ] || rm -f "$file"
    done
    if [ -e "$in/public/.removed.json" ]; then  # a dot: an identity may be called "removed"
        put "$in/public/.removed.json" "$out/removed.json"
    fi
    put "$in/tickets/tickets.json" "$out/tickets.json"
    put "$in/identity.json" "$out/secret/$IDENTITY.json"
    if [ -e "$in/operator.json" ]; then
        put "$in/operator.json" "$out/secret/operator-drain.json"
    fi
    if [ -e "$in/admission/admission.json" ]; then
        mkdir -p "$out/tokens" "$out/.seen"
        for file in "$in"/admission/*.json; do
            name=${file##*/}
            case $name in
                admission.json | public-admission.json) put "$file" "$out/$name" ;;
                *)
                    cmp -s "$file" "$out/.seen/$name" || {
                        cp "$file" "$out/tokens/.$name"
                        chmod 600 "$out/tokens/.$name"
                        mv -f "$out/tokens/.$name" "$out/tokens/$name"
                        put "$file" "$out/.seen/$name"
                    }
                    ;;
            esac
        done
    fi
    touch "$out/.ready"
}

sync_once
[ "${1:-}" != once ] || exit 0
trap 'exit 0' TERM INT
while :; do
    sleep 10 &
    wait $!
    sync_once || echo "sync-keys: tried in vain, again in 10 s" >&2
done
