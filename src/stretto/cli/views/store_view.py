"""What a folder of prepared data holds, for `stretto show`."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from stretto.base.run_folder import DATA_SPEC
from stretto.cli.views.console import make_console
from stretto.cli.views.store_lines import describe_classes, describe_store
from stretto.store.corpus import Corpus
from stretto.store.index import INDEX, Store
from stretto.store.sequences import Channels, Classes, NamedValues, Sequences, SequencesFields


def find_stores(path: str) -> list[Path]:
    """Return the folders with prepared data at a path: itself, or its subfolders, such as `train` and `valid`.

    None in a run's folder, where data may be kept as well: the run is meant.
    """
    folder = Path(path)
    if (folder / INDEX).is_file():
        return [folder]
    if (folder / DATA_SPEC).is_file():
        return []
    return sorted(index.parent for index in folder.glob(f"*/{INDEX}"))


def show_stores(folders: list[Path]) -> None:
    """Print what each folder holds: rows, time steps, fields, classes, categories and scaling."""
    console = make_console()
    for folder in folders:
        store = Store.open(folder)
        if store.kind != SequencesFields.kind:
            console.print(describe_store(Corpus.from_store(store)))
            continue
        _show_sequences(console, Sequences.from_store(store))


def _show_sequences(console: Console, sequences: Sequences) -> None:
    console.print(describe_store(sequences))
    values, targets, origin = sequences.fields.values, sequences.fields.targets, sequences.fields.origin
    if origin is not None:
        read_from = {
            "inputs": ", ".join(origin.inputs),
            "targets": ", ".join(origin.targets),
            "series": origin.by,
            "time": origin.time and origin.time + (f" ({origin.time_format})" if origin.time_format else ""),
        }
        read_text = "; ".join(f"{name} from {fields}" for name, fields in read_from.items() if fields)
        if read_text:
            console.print(f"  read: {read_text}")
    if isinstance(values, Channels):
        console.print(_value_table(values, "input"))
    if isinstance(targets, Classes):
        console.print(f"  {describe_classes(sequences)}")
    elif targets is not None:
        console.print(_value_table(targets, "target"))


def _value_table(values: NamedValues, title: str) -> Table:
    """Return a table of channels or values: how they are scaled if data.scale is standard, or their categories."""
    table = Table(title, "mean", "std", "")
    categories = values.categories if isinstance(values, Channels) else {}
    for name, mean, std in zip(values.names, values.mean, values.std, strict=True):
        notes = [
            *(["known future"] if name in values.known_future else []),
            *(["static"] if name in values.static else []),
        ]
        if name in categories:
            names = ", ".join(categories[name][:8]) + (", ..." if len(categories[name]) > 8 else "")
            notes.insert(0, f"{len(categories[name]):,} categories: {names}")
            table.add_row(name, "", "", "; ".join(notes))
        else:
            table.add_row(name, f"{mean:.6g}", f"{std:.6g}", "; ".join(notes))
    return table
