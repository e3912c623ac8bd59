#!/bin/sh
# install.sh ENVIRONMENT WORD...: what `pip install WORD...` would, in a tenth of its time, by uv; by pip where uv cannot.
#
# uv reads none of pip's settings: an index that they name is handed on, and where they name more than that pip does it.
# This project is built anew each time: uv would take its C code for unchanged as long as pyproject.toml is.
set -eu
environment=$1
shift

by_pip() {
	exec "$environment/bin/pip" install --disable-pip-version-check --no-compile "$@"
}

settings=$("$environment/bin/pip" config list 2> /dev/null || true)
set_for_pip() {
	printf '%s\n' "$settings" | sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" | tail -1
}

for setting in no-index require-hashes trusted-host client-cert proxy only-binary no-binary constraint; do
	[ -z "$(set_for_pip $setting)" ] || by_pip "$@"
done
test -x "$environment/bin/uv" || "$environment/bin/pip" install --disable-pip-version-check --no-compile -qq uv || by_pip "$@"
index=$(set_for_pip index-url)
certificates=$(set_for_pip cert)
[ -z "$certificates" ] || export SSL_CERT_FILE="$certificates"
"$environment/bin/uv" pip install --python "$environment/bin/python" ${index:+--default-index "$index"} \
	--reinstall-package kvbaton --reinstall-package kvbaton-proof "$@" || by_pip "$@"
