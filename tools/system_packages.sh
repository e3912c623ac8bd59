#!/bin/sh
# Makes programs of the system available to tests, in .tools/bin: `system_packages.sh [prometheus] [chromium]`.
# What is on PATH is taken. Else it comes from the distribution's packages: prometheus is unpacked beside this project,
# so that no service of the system is started; chromium, which needs libraries, is installed, if that is allowed.
set -eu
tools=$(cd "$(dirname "$0")/.." && pwd)/.tools
mkdir -p "$tools/bin"

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; elif sudo -n true 2>/dev/null; then sudo -n "$@"; else return 1; fi
}

refresh() {  # once
    [ -n "${refreshed:-}" ] || as_root apt-get update -qq >/dev/null 2>&1 || true
    refreshed=yes
}

give_up() {
    echo "system_packages.sh: $1 cannot be had here; install it and run make again (Debian: apt-get install $2)" >&2
    exit 1
}

link() {
    found=$(command -v "$1" 2>/dev/null) && ln -sf "$found" "$tools/bin/$1"
}

get_prometheus() {
    if link prometheus && link promtool; then return; fi
    command -v apt-get >/dev/null || give_up prometheus prometheus
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    download='cd "$1" && apt-get download -q -o APT::Sandbox::User=root prometheus >/dev/null 2>&1'
    sh -c "$download" sh "$work" || { refresh; sh -c "$download" sh "$work"; } || give_up prometheus prometheus
    dpkg-deb -x "$work"/prometheus_*.deb "$work/unpacked"
    for name in prometheus promtool; do
        rm -f "$tools/bin/$name"
        mv "$work/unpacked/usr/bin/$name" "$tools/bin/$name"
        "$tools/bin/$name" --version >/dev/null 2>&1 || give_up "a $name that runs" prometheus
    done
}

get_chromium() {
    if link chromium; then return; fi
    command -v apt-get >/dev/null || give_up chromium chromium
    refresh
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1 \
        || give_up chromium chromium
    link chromium || give_up chromium chromium
}

for wanted in "${@:-prometheus}"; do
    case $wanted in
        prometheus) get_prometheus ;;
        chromium) get_chromium ;;
        *) echo "system_packages.sh: $wanted: expected prometheus or chromium" >&2; exit 2 ;;
    esac
done
