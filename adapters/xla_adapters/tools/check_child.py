"""The process that runs a checked script: `python -m xla_adapters.tools.check_child FACTS STEPS [-m] SCRIPT ...`."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path

from xla_adapters.errors import XLAAdapterError
from xla_adapters.runtime import prepare
from xla_adapters.tools.check_batches import Batches
from xla_adapters.tools.check_facts import Facts, Place
from xla_adapters.tools.check_watch import Stop, Watch
from xla_adapters.tools.running import run_command
from xla_adapters.tools.saving import FilesWritten, skipping_saves
from xla_adapters.tools.user_script import Hand, put_in
from xla_adapters.utils.location import location_of


def run(path: Path, steps: int, command: list[str]) -> Facts:
    """Runs a script until it has done some steps, and writes what it did to a file after each of them.

    Args:
        path: of the file; the folder that it is in is for temporary files.
        steps: how many training steps.
        command: the script and its arguments; or `-m`, a module and its arguments.
    """
    facts = Facts(asked=steps)
    watch = Watch(facts, lambda: facts.save(path))
    batches = Batches(facts)
    watch.when_training_step_ends = batches.training_step_ended
    facts.save(path)
    # As an import of an adapter would, before another library starts the runtime.
    prepare()
    with ExitStack() as stack:
        stack.enter_context(watch.watching())
        stack.enter_context(batches.watching())
        stack.enter_context(skipping_saves(path.parent, watch.skip))
        stack.enter_context(put_in(Hand(folder=path.parent, change=watch.change, skip=watch.skip)))
        FilesWritten(facts.written.append)
        try:
            run_command(command)
            facts.state = "ended"
        except Stop:
            facts.state = "stopped"
        except SystemExit as error:
            facts.state = "ended" if error.code in (None, 0) else "failed"
            facts.error = f"the script ended with the exit status {error.code}" if facts.state == "failed" else ""
        except XLAAdapterError as error:
            facts.state = "refused"
            _note_error(facts, error)
        except BaseException as error:  # noqa: BLE001 (it is reported)
            facts.state = "failed"
            _note_error(facts, error)
    facts.save(path)
    return facts


def _note_error(facts: Facts, error: BaseException) -> None:
    traceback.print_exception(error)
    facts.error = f"{type(error).__name__}: {error}"
    location = location_of(error.__traceback__)
    where = location.called_from or location if location is not None else None
    if where is not None:
        facts.error_place = Place(file=where.filename, line=where.lineno)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    sys.stdout.flush()
    sys.stderr.flush()
    # The script is left in the middle: its worker processes and threads end with this process.
    os._exit(0)
