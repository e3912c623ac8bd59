"""The completion script for bash.

Law: it requires bash 4 and nothing else, and defines nothing but its function. It first walks the line to find the
current command and how many positionals came before; the rest is lookup.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvbaton.cli.completion_words import Taker, WordNode, walk

_HEAD = """\
# bash completion for kvbaton, made by: kvbaton completion bash

_kvbaton() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} path="" word i count=0 takes="" words=""
    COMPREPLY=()
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $before == "=" ]]; then
        before=${COMP_WORDS[COMP_CWORD-2]}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        case "$path $word" in
"""
_WALK_END = """\
                [[ ${COMP_WORDS[i+1]} == "=" ]] && ((i++))
                ((i++)) ;;
            *" -"*) ;;
            *) ((count++)) ;;
        esac
    done
    case "$path $before" in
"""
_TAIL = """\
    esac
    if [[ -z $takes ]]; then
        if [[ $current == -* ]]; then
            takes=words
            case $path in
"""
_END = """\
            esac
        fi
    fi
    case $takes in
        words) COMPREPLY=($(compgen -W "$words" -- "$current")) ;;
        file | dir)
            local IFS=$'\\n'
            compopt -o filenames 2>/dev/null
            if [[ $takes == dir ]]; then
                COMPREPLY=($(compgen -d -- "$current"))
            else
                COMPREPLY=($(compgen -f -- "$current"))
            fi ;;
    esac
}
complete -F _kvbaton kvbaton
"""


def bash(root: WordNode) -> str:
    """The whole script."""
    nodes = list(walk(root))
    lines = [_HEAD.rstrip("\n")]
    for path, node in nodes:
        for each in node.below:
            full = f"{path} {each.name}".strip()
            lines.append(f'            "{path} {each.name}") path="{full}" ;;')
    lines.append("            " + " | ".join(_valued(nodes)) + ")")
    lines.append(_WALK_END.rstrip("\n"))
    for path, node in nodes:
        for flag in node.flags:
            if flag.takes != "nothing":
                pattern = " | ".join(f'"{path} {word}"' for word in flag.words)
                lines.append(f"        {pattern}) {_set(flag)} ;;")
    lines.append(_TAIL.rstrip("\n"))
    lines += [f'                "{path}") words="{_flag_words(node)}" ;;' for path, node in nodes]
    lines.append('            esac\n        else\n            case "$path $count" in')
    for path, node in nodes:
        lines += _places(path, node)
    lines.append(_END.rstrip("\n"))
    return "\n".join(lines) + "\n"


def _valued(nodes: list[tuple[str, WordNode]]) -> Iterator[str]:
    for path, node in nodes:
        for flag in node.flags:
            if flag.takes != "nothing":
                yield from (f'"{path} {word}"' for word in flag.words)


def _flag_words(node: WordNode) -> str:
    return " ".join(word for flag in node.flags for word in flag.words if word.startswith("--"))


def _set(taker: Taker) -> str:
    """The possible values; free text is not completed."""
    if taker.takes == "choice":
        return f'takes=words words="{" ".join(taker.choices)}"'
    return f"takes={taker.takes}"


def _places(path: str, node: WordNode) -> Iterator[str]:
    """Completions where no flag is expected: a command, a positional, or else the flags."""
    if node.below:
        names = " ".join(each.name for each in node.below)
        yield f'                "{path} 0") takes=words words="{names}" ;;'
    for at, place in enumerate(node.places):
        pattern = f'"{path} "*' if place.many else f'"{path} {at}"'
        yield f"                {pattern}) {_set(place)} ;;"
    if not node.below and not any(place.many for place in node.places):
        yield f'                "{path} "*) takes=words words="{_flag_words(node)}" ;;'
