#!/bin/sh
# Makes an environment with atheris: tools/fuzz_env.sh .venv-fuzz [python3]
#
# A wheel is taken where the package index has one. Where it has none (aarch64), atheris is built from its source, which
# takes about five minutes and a clang that comes with libFuzzer. Set CLANG_BIN to that clang if it is not in PATH.
set -eu

venv=${1:?which folder?}
python=${2:-python3}
atheris=${ATHERIS:-atheris==3.0.0}
pip="$venv/bin/pip install -q --disable-pip-version-check"

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
$pip -e '.[serve]'

if ! $pip --only-binary :all: "$atheris" 2>/dev/null; then
    clang=${CLANG_BIN:-$(command -v clang || ls /usr/bin/clang-[0-9]* /usr/lib/llvm-*/bin/clang 2>/dev/null | tail -n 1 || true)}
    if [ -z "$clang" ] || [ -z "$(find "$(dirname "$("$clang" -print-libgcc-file-name --rtlib=compiler-rt)")" -name 'libclang_rt.fuzzer_no_main*' 2>/dev/null)" ]; then
        cat >&2 <<'END'
fuzz: atheris has no wheel for this machine, and building it needs clang with libFuzzer, which was not found. Either
  as root:        apt-get install clang libclang-rt-dev       (Debian 12: clang-19 libclang-rt-19-dev)
  without root:   apt-get download the packages that `apt-get install -s --no-install-recommends clang-19
                  libclang-rt-19-dev` lists, `dpkg -x` each into one folder, and run again with
                  CLANG_BIN=FOLDER/usr/lib/llvm-19/bin/clang
                  LD_LIBRARY_PATH=FOLDER/usr/lib/$(uname -m)-linux-gnu:FOLDER/usr/lib/llvm-19/lib
Without atheris:  make fuzz-own     the fuzzer of tests/fuzz/guided.py with other inputs each time, ten times as many
END
        exit 1
    fi
    echo "fuzz: building atheris with $clang (about five minutes, once)"
    CLANG_BIN="$clang" $pip "$atheris"
fi
"$venv/bin/python" -c 'import atheris'
