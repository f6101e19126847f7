"""The `tinyllm` command: arguments flow in, an exit code comes out (0 done, 1 failed, 2 wrong usage, 130 Ctrl-C).

Next to nothing is imported before `main` is entered, so that Ctrl-C is quiet from the start.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import NoReturn, TextIO

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk or a quota


def main() -> NoReturn:
    """Entry point of the `tinyllm` command."""
    _prepare_streams()
    code = _run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _leave_closed_pipe()
    except OSError as error:  # a full disk, for one
        code = _leave_full_disk(error)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Run a command line; whatever goes wrong becomes one line on stderr."""
    try:
        return _run_app(arguments)
    except KeyboardInterrupt:
        return 130


def _run_app(arguments: list[str]) -> int:
    from tinyllm.errors import TinyLLMError
    from tinyllm_cli.app import app
    from tinyllm_cli.lazy import ClosedPipe

    try:
        app(arguments, prog_name="tinyllm")
    except SystemExit as exit_:
        if exit_.code == 130 and sys.stderr.isatty():
            print(file=sys.stderr)  # the shell's prompt shall not stand behind the ^C
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except ClosedPipe:
        return _leave_closed_pipe()
    except TinyLLMError as error:
        return _fail(str(error))
    except MemoryError:
        return _fail("not enough memory")
    except Exception as error:
        if os.environ.get("TINYLLM_TRACEBACK"):
            raise
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
            return _leave_full_disk(error)
        if isinstance(error, OSError) and error.strerror:
            return _fail(f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror)
        return _fail(f"unexpected {type(error).__name__}: {error} (TINYLLM_TRACEBACK=1 shows where)")
    return 0


def _fail(message: str) -> int:
    from tinyllm_cli.text import one_line

    print(f"tinyllm: error: {one_line(message)}", file=sys.stderr)
    return 1


def _prepare_streams() -> None:
    """Make printing safe: any text in any locale, and also without a stdout or stderr."""
    for name, errors in (("stdout", "replace"), ("stderr", "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _nowhere())
        elif hasattr(stream, "reconfigure"):
            # Files and pipes get UTF-8 whatever the locale; a terminal gets what it says that it understands.
            chosen = None if stream.isatty() or os.environ.get("PYTHONIOENCODING") else "utf-8"
            stream.reconfigure(encoding=chosen, errors=errors)


def _leave_closed_pipe() -> int:
    """Nobody reads on: end without a word, with the code that a shell gives to a process that SIGPIPE has ended."""
    _discard_output()
    return 141


def _leave_full_disk(error: OSError) -> int:
    """What stdout was to get is lost; errors about other files have the file's name."""
    _discard_output()
    return _fail(f"the output cannot be written: {error.strerror}")


def _discard_output() -> None:
    """Let the flush at interpreter exit go nowhere instead of failing again."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = _nowhere()


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


if __name__ == "__main__":
    main()
