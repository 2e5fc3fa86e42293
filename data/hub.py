"""Rows of a data set on the hub, one by one as they come.  Called by `data.sources` and `data.benchmarks`."""

from collections.abc import Iterator
from typing import Any

import httpx

from data.rows import Placed, without_unset
from recipes.errors import MachineError, UserError


def read_hub(where: str, *names: str | None, **options: Any) -> Iterator[Placed]:
    """As a stream: nothing but the row at hand is kept.

    where: what messages call it.  names, options: as `datasets.load_dataset` takes them.  Raises UserError
    for what is not there, MachineError where reading ends too early.
    """
    # it takes seconds to import, and most recipes read files
    from datasets import load_dataset  # noqa: PLC0415
    from datasets.exceptions import DatasetsError  # noqa: PLC0415

    number = 0
    try:
        for number, row in enumerate(load_dataset(*names, **options, streaming=True), start=1):
            yield f"row {number}", without_unset(row)
    except (DatasetsError, ValueError) as error:
        raise UserError(f"{where}: after {number:,} rows, {error}") from error
    except (OSError, httpx.HTTPError) as error:
        raise MachineError(f"{where}: reading it ended after {number:,} rows ({error})") from error
