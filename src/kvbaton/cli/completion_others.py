"""The completion scripts for zsh and fish, which handle descriptions, repeats and files themselves.

Law: help texts are quoted, whatever they contain; nothing in them is run or expanded.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvbaton.cli.completion_words import Taker, WordNode, walk

_ZSH_FILES = {"file": "_files", "dir": "_files -/"}


def zsh(root: WordNode) -> str:
    """One function per command, each with its own `_arguments`."""
    lines = ["#compdef kvbaton", "# zsh completion for kvbaton, made by: kvbaton completion zsh", ""]
    for path, node in walk(root):
        lines += [*_zsh_function(path, node), ""]
    lines += ['if [ "$funcstack[1]" = "_kvbaton" ]; then', '    _kvbaton "$@"', "else", "    compdef _kvbaton kvbaton"]
    return "\n".join([*lines, "fi", ""])


def _zsh_function(path: str, node: WordNode) -> Iterator[str]:
    name = "_".join(["_kvbaton", *path.split()])
    yield f"{name}() {{"
    if node.below:
        yield '    local context state state_descr line curcontext="$curcontext"'
        yield "    typeset -A opt_args"
    words = [word for flag in node.flags for word in _zsh_flag(flag)]
    if node.below:
        words += ["'1:command:->command'", "'*::argument:->arguments'"]
    words += [_zsh_place(place, at) for at, place in enumerate(node.places, 1)]
    yield "    _arguments " + ("-C " if node.below else "") + "-s -S \\"
    yield from (f"        {word} \\" for word in words[:-1])
    yield f"        {words[-1]}" + (" && return" if node.below else "")
    if node.below:
        yield "    case $state in"
        yield "        command)"
        yield "            local -a commands=("
        yield from (f"                {_quoted(f'{each.name}:{each.about}')}" for each in node.below)
        yield "            )"
        yield "            _describe command commands ;;"
        yield "        arguments)"
        yield "            case $line[1] in"
        yield from (f"                {each.name}) {name}_{each.name} ;;" for each in node.below)
        yield "            esac ;;"
        yield "    esac"
    yield "}"


def _zsh_flag(flag: Taker) -> Iterator[str]:
    about = _bare(flag.about)
    for word in flag.words:
        repeat = "*" if flag.many else ""
        equals = "=" if word.startswith("--") and flag.takes != "nothing" else ""
        yield _quoted(f"{repeat}{word}{equals}[{about}]{_zsh_value(flag)}")


def _zsh_place(place: Taker, at: int) -> str:
    return _quoted(f"{'*' if place.many else at}{_zsh_value(place)}")


def _zsh_value(taker: Taker) -> str:
    if taker.takes == "nothing":
        return ""
    label = _bare(taker.label)
    if taker.takes == "choice":
        return f":{label}:({' '.join(taker.choices)})"
    return f":{label}:{_ZSH_FILES.get(taker.takes, '')}"


def _bare(text: str) -> str:
    """Without the characters that are special inside a specification."""
    return text.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")


def fish(root: WordNode) -> str:
    """One `complete` per word; a function finds the command that the line is in."""
    lines = ["# fish completion for kvbaton, made by: kvbaton completion fish", "", *_fish_path(root), ""]
    lines.append("complete -c kvbaton -f")
    for path, node in walk(root):
        at = f"-n {_fish_quoted(f'__kvbaton_at {path}'.strip())}"
        lines += [f"complete -c kvbaton {at} -a {each.name} -d {_fish_quoted(each.about)}" for each in node.below]
        for place in node.places:
            lines += [f"complete -c kvbaton {at}{value}" for value in filter(None, [_fish_value(place)])]
        for flag in node.flags:
            words = " ".join(f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" for word in flag.words)
            required = " -r" if flag.takes != "nothing" else ""
            lines.append(f"complete -c kvbaton {at} {words}{required}{_fish_value(flag)} -d {_fish_quoted(flag.about)}")
    return "\n".join(lines) + "\n"


def _fish_path(root: WordNode) -> Iterator[str]:
    yield "function __kvbaton_at"
    yield "    set -l path"
    yield "    set -l words (commandline -opc)"
    yield "    set -e words[1]"
    yield "    for word in $words"
    yield '        switch "$path $word"'
    for path, node in walk(root):
        for each in node.below:
            full = f"{path} {each.name}".strip()
            yield f"            case '{path} {each.name}'"
            yield f"                set path {_fish_quoted(full)}"
    yield "        end"
    yield "    end"
    yield '    test "$path" = "$argv"'
    yield "end"


def _fish_value(taker: Taker) -> str:
    """After a flag `-x` suppresses file names; a positional has none to begin with."""
    only = " -x" if taker.words else ""
    if taker.takes == "choice":
        return f"{only} -a {_fish_quoted(' '.join(taker.choices))}"
    if taker.takes == "dir":
        return f"{only} -a {_fish_quoted('(__fish_complete_directories)')}"
    if taker.takes == "file":
        return " -F"
    return only if taker.takes == "text" else ""


def _quoted(text: str) -> str:
    """In single quotes, where neither shell expands anything; a quote itself becomes a typographic one."""
    return "'" + " ".join(text.replace("'", "’").split()) + "'"


def _fish_quoted(text: str) -> str:
    return _quoted(text.replace("\\", "\\\\"))
