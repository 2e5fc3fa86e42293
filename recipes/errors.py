"""Two kinds of failure that a person sees without a traceback, and how a command ends on each."""

import errno
import sys
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

MISTAKE, FAULT = 2, 1  # exit codes


class UserError(ValueError):
    """A user's mistake: the message says what was wrong, what was found and what to write instead."""


class MachineError(RuntimeError):
    """A fault of the machine (a full disk, a child process that died): nothing the user wrote is wrong."""


def end(message: str, code: int) -> NoReturn:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[red bold]error:[/] {escape(message)}")
    sys.exit(code)


def run_command(command: Callable[[], None]) -> None:
    """Runs an entry script's main; a UserError exits with 2, a MachineError or a full disk with 1."""
    try:
        command()
    except UserError as mistake:
        end(str(mistake), MISTAKE)
    except MachineError as fault:
        end(str(fault), FAULT)
    except OSError as fault:
        if fault.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        what = fault.filename or "a file"
        end(
            f"no space left on the disk while writing {what}; free some and run the same command again", FAULT
        )
