"""``nidiff --completion SHELL``: what a shell needs to complete commands and flags by the Tab key."""

from collections.abc import Mapping

from nidiff.commands.usage import flags_of
from nidiff.errors import one_of

# The beginning of the script. zsh reads that of bash.
SHELLS = {"bash": "", "zsh": "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"}
SCRIPT = """_nidiff() {{
  local word="$2" offered=""
  set -- "${{COMP_WORDS[@]}}"
  case $COMP_CWORD:$2 in
    1:*) offered="{commands}" ;;
{flags}
  esac
  COMPREPLY=()
  if [ "$COMP_CWORD" = 1 ] || [ "${{word#-}}" != "$word" ]; then COMPREPLY=($(compgen -W "$offered" -- "$word")); fi
}}
complete -o default -F _nidiff nidiff"""


def completion(shell: str, commands: Mapping[str, type]) -> str:
    """The script for a shell: after ``nidiff`` it completes commands, after a command its flags, and else files."""
    begin = SHELLS[one_of("completion", shell, SHELLS)]
    flags = [f'    *:{name}) offered="{" ".join([*flags_of(one), "--help"])}" ;;' for name, one in commands.items()]
    names = " ".join([*commands, "--completion", "--help", "--version"])
    return begin + SCRIPT.format(commands=names, flags="\n".join(flags))
