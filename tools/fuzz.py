"""Long fuzzing of every target with atheris (libFuzzer), and the corpus that is kept in the repository.

    python tools/fuzz.py all --seconds 60 [--targets codec,plain]   each target in a process of its own; in .venv-fuzz
    python tools/fuzz.py one codec [libFuzzer's options and folders]
    python tools/fuzz.py keep [--inputs 20000]                      make tests/fuzz/corpus anew; needs no atheris

New inputs go to build/fuzz/<target>, those that break a law to build/fuzz/crashes/<target>. docs/fuzzing.md says more.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FUZZ = ROOT / "tests" / "fuzz"
WORK = ROOT / "build" / "fuzz"
FILES_MAX = 24
FILE_BYTES_MAX = 2048

sys.path.insert(0, str(FUZZ))


def module_of(name: str) -> str:
    """The module that lists this target; found without an import, since the first import is the instrumented one."""
    lists = {path.stem: path.read_text().partition("\nTARGETS = (")[2] for path in sorted(FUZZ.glob("targets_*.py"))}
    return next(module for module, text in lists.items() if f'"{name}"' in text)


def one(name: str, options: list[str]) -> None:
    """One target, in this process, until libFuzzer ends it."""
    import atheris

    module = module_of(name)
    with atheris.instrument_imports(
        include=["kvbaton"], exclude=["kvbaton_proof.sim"]
    ):  # slow: only what this one needs
        targets = importlib.import_module(module).TARGETS
    from mutators import mutated

    logging.disable(logging.CRITICAL)
    target = next(each for each in targets if each.name == name)
    seeds = target.seeds()

    def mutate(data: bytes, size_max: int, seed: int) -> bytes:
        rng = random.Random(seed)
        changed = mutated(rng, target.shape, data, seeds) if rng.random() < 0.6 else atheris.Mutate(data, size_max)
        return bytes(changed[:size_max])

    atheris.Setup([sys.argv[0], *options], target.run, custom_mutator=mutate)
    atheris.Fuzz()


def every(seconds: int, names: list[str]) -> int:
    """All targets, one after the other; how many broke."""
    import targets

    broken = []
    for name in names or list(targets.TARGETS):
        found, crashes = WORK / name, WORK / "crashes" / name
        for folder in (found, crashes):
            folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(targets.TARGETS[name].seeds()):
            (found / f"seed-{number}").write_bytes(data)
        options = [f"-max_total_time={seconds}", f"-artifact_prefix={crashes}/", "-max_len=8192", "-timeout=10"]
        options += ["-rss_limit_mb=2048", "-verbosity=0", "-print_final_stats=1"]
        known = [str(folder / name) for folder in (targets.CORPUS, targets.CRASHES) if (folder / name).is_dir()]
        print(f"{name}: {seconds} s", flush=True)
        command = [sys.executable, __file__, "one", name, *options, str(found), *known]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 600, check=False)
        stats = [line for line in done.stderr.splitlines() if "number_of_executed_units" in line]
        print(f"  {stats[-1].split()[-1] if stats else 'no'} inputs", flush=True)
        if done.returncode:
            broken.append(name)
            print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", flush=True)
    targets.close()
    print(f"broken: {', '.join(broken)}; inputs in {WORK / 'crashes'}" if broken else "no law was broken")
    return len(broken)


def keep(inputs: int, names: list[str]) -> None:
    """Explore from what is kept and found so far; keep the smallest inputs that reach all that was reached."""
    import targets
    from guided import Coverage, News, explore

    for name in names or list(targets.TARGETS):
        target = targets.TARGETS[name]
        found = [path.read_bytes() for path in sorted((WORK / name).glob("*"))]
        explored = explore(target, inputs=inputs, seed=1, kept=[*targets.kept(name), *found])
        coverage = Coverage()
        small = sorted(
            {each for each in explored.kept if len(each) <= FILE_BYTES_MAX}, key=lambda each: (len(each), each)
        )
        news = [(coverage.news(target.run, data), data) for data in small]
        chosen = [data for what in (News.PLACES, News.WORDS) for is_new, data in news if is_new is what][:FILES_MAX]
        folder = targets.CORPUS / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for number, data in enumerate(chosen):
            (folder / f"{number:02}").write_bytes(data)
        print(f"{name}: {len(chosen)} of {len(explored.kept)}, {sum(map(len, chosen))} bytes", flush=True)
    targets.close()


def main() -> Any:
    if sys.argv[1:2] == ["one"]:
        return one(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["all", "keep"])
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--inputs", type=int, default=8000, help="of each target")
    parser.add_argument("--targets", default="", help="with commas between; all if left out")
    args = parser.parse_args()
    names = [name for name in args.targets.split(",") if name]
    return keep(args.inputs, names) if args.what == "keep" else every(args.seconds, names)


if __name__ == "__main__":
    sys.exit(main())
