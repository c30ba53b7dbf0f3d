"""The errors that docs/reference/errors.md lists: message, meaning, remedy, and how to trigger each."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
from torch import nn

from helpers import error_triggers as triggers
from stretto import StrettoError, TrainConfig, Trainer, make_engine, testing
from stretto.base.errors import DivergedError, FencedError, PlanError
from stretto.base.task import Task
from stretto.blocks.network import build_network
from stretto.blocks.row_summary import check_row_summary, find_unsummarized
from stretto.blocks.vocab_check import check_vocab_parallel
from stretto.checkpoint import find_checkpoint
from stretto.cli.commands.verify import LayoutMismatchError
from stretto.config.model import ModelConfig
from stretto.data import Batches, from_arrays
from stretto.errors import ConfigError, DataError, LawError, LostPeerError, MeshError, PreemptedError
from stretto.mesh.c10d import HashStore
from stretto.mesh.rendezvous import rendezvous
from stretto.mesh.signed_store import SignedStore
from stretto.nn import (
    CRF,
    LSTM,
    BidirectionalLSTM,
    CrossEntropy,
    CTCLoss,
    Dropout,
    Embedding,
    Linear,
    Pointwise,
    QuantileLoss,
    Residual,
    SquaredError,
    Stack,
    initialize,
)
from stretto.prepare.tokenizer import open_tokenizer
from stretto.train.row_loss_check import check_row_loss


@dataclass(frozen=True)
class ErrorCase:
    """One error. `<...>` in a message stands for what differs; `trigger` is a command line, or code, that raises it."""

    message: str
    meaning: str
    remedy: str
    trigger: str | Callable[[], object]
    error: type[StrettoError] = ConfigError


@dataclass(frozen=True)
class ErrorSection:
    """The errors of one task."""

    title: str
    about: str
    cases: tuple[ErrorCase, ...]


ERROR_SECTIONS = (
    ErrorSection(
        "The command line and the config",
        "Reported at once, before torch is imported. Fields are listed in [config](config.md), commands in "
        "[commands](commands.md).",
        (
            ErrorCase(
                "the following arguments are required: COMMAND; see `stretto --help`",
                "`stretto` alone does nothing.",
                "Use one of the commands that `stretto --help` lists.",
                "stretto",
            ),
            ErrorCase(
                "<word> is not a command; did you mean <command>?",
                "There is no such command.",
                "Check the spelling; `stretto --help` lists all commands.",
                "stretto trian run.toml",
            ),
            ErrorCase(
                "<option> is not an option of `stretto train`; did you mean <option>?",
                "There is no such option, but there is one with a similar name, or a field of that name in a section.",
                "Use the suggested option, or see `stretto train --help`.",
                "stretto train run.toml --lr 0.001",
            ),
            ErrorCase(
                "<option> is not an option of `stretto train`; it is a section; choose from <options>",
                "The option names a section of the config, not one of its fields.",
                "Use a field of the section, such as `--layout.stages 2`.",
                "stretto train run.toml --layout 2",
            ),
            ErrorCase(
                "<option> is not an option of `stretto train`; write <option> true",
                "The option names a section of the config, and the word after it one of its fields.",
                "Join the two with a dot, as in the message.",
                "stretto train run.toml --layout auto",
            ),
            ErrorCase(
                "--<option>=<value> is an option of --gpu; add --gpu, or leave it out",
                "Without `--gpu`, `stretto doctor` starts ranks with the backend of their device, and writes findings to `--json`.",
                "Add `--gpu` to check GPUs.",
                "stretto doctor --backend strict",
            ),
            ErrorCase(
                "--<option>=<value> can't be combined with --gpu; leave it out, or use --output",
                "`stretto doctor --gpu` checks no folders of a run, and writes its results to `--output`.",
                "Use two commands: `stretto doctor --run RUN.toml` and `stretto doctor --gpu`.",
                "stretto doctor --gpu --json findings.json",
            ),
            ErrorCase(
                "--output=<file> can't be written; choose a file in a folder that you can write to",
                "The folder of the file does not exist, or you have no permission to write there.",
                "Choose a different file, or create its folder.",
                "stretto doctor --gpu --output absent/gpu.json",
            ),
            ErrorCase(
                "<file> does not exist; use the path of a run's TOML file",
                "The first argument of `train`, `plan`, `profile` and `verify` is the file that describes the run.",
                "Check the path, and the folder that you are in.",
                "stretto train nowhere.toml",
            ),
            ErrorCase(
                "<file> is not valid TOML: <what and where>; correct the file",
                "The file can't be parsed; the message has the line and the column.",
                "Put text in quotes, and the name of a section in square brackets: `[data]`.",
                triggers.no_toml,
            ),
            ErrorCase(
                "<file>: data: train is missing; set it to the folder of the data, or set factory",
                "A run must know its data.",
                'Write `train = "FOLDER"` under `[data]`; `stretto prepare` writes that folder.',
                triggers.no_data,
            ),
            ErrorCase(
                "<file>: [data] is missing; add that section, with train set to the folder of the data",
                "Every run needs data.",
                'Write `[data]` and below it `train = "FOLDER"`.',
                triggers.no_data_section,
            ),
            ErrorCase(
                "<file>: <field> is outside of its section; move it to [<section>]",
                "Fields must be below the name of their section; this one is above all sections.",
                "Move the field below the section in the message.",
                triggers.no_section,
            ),
            ErrorCase(
                '<file>: <section>.layout is not a known field; write `layout = "auto"` above the first section, or a '
                "section [layout]",
                "In TOML, a line belongs to the section above it, so the short form must come before all sections.",
                'Move `layout = "auto"` to the top of the file.',
                triggers.auto_layout_in_a_section,
            ),
            ErrorCase(
                "--<field>=<value> should be greater than 0",
                "The value is outside the allowed range; other fields report their own range in the same way.",
                "See the field in [config](config.md).",
                "stretto train run.toml --train.lr -1",
            ),
            ErrorCase(
                "--<field>=<value> should be a valid number",
                "The text is not of the field's type.",
                "Write numbers like `0.001` or `1e-3`, and booleans as `true` or `false`.",
                "stretto train run.toml --train.lr fast",
            ),
            ErrorCase(
                "<file>: data='data/train' should be a section; write it as [data]",
                "A section was written as one value.",
                "Put `[data]` on a line of its own and its fields below it.",
                triggers.section_as_value,
            ),
            ErrorCase(
                "<file>: layout: auto can't be combined with <fields>; leave out one or the other",
                'With `layout = "auto"` the planner chooses replicas, stages, micro-batches and chunks.',
                "Leave these fields out; [The planner](../concepts/planner.md) explains how it chooses.",
                triggers.two_configs,
            ),
            ErrorCase(
                "<file>: layout: blocks=[<numbers>] must have one number >= 1 per stage (stages=<n>)",
                "The list needs one number for each stage.",
                "Give as many numbers as stages, or leave `layout.blocks` out to balance the stages automatically.",
                "stretto train run.toml --layout.stages 2 --layout.blocks 3",
            ),
            ErrorCase(
                "<file>: model: projection=<n> needs cell='lstm'; remove projection",
                "Torch's GRU has no projection.",
                'Leave `model.projection` out, or use `cell = "lstm"`.',
                "stretto train run.toml --model.cell gru --model.projection 4",
            ),
            ErrorCase(
                "<file>: train.<field>=<value> depends on evaluations during the run; set data.valid and run.eval_every",
                "Early stopping (`train.patience`) and the plateau schedule compare the validation losses of a run.",
                "Set `data.valid` and `run.eval_every`, or leave the field out.",
                "stretto train run.toml --train.patience 3",
            ),
            ErrorCase(
                "<file>: metrics: names=<name> is not a built-in metric, and has no file or module; <remedy>",
                "Built-in metrics are `accuracy`, `f1`, `per_class` and `mae`.",
                "Use one of them, or name your own as `file.py:name`.",
                "stretto train run.toml --metrics.names f2",
            ),
            ErrorCase(
                "<file>: metrics: monitor=<name> is not a metric of the evaluations; <remedy>",
                "Early stopping and the best checkpoint need the loss or a metric in `metrics.names`.",
                "Add it to `metrics.names`, or use one that is there.",
                "stretto train run.toml --metrics.monitor f1",
            ),
            ErrorCase(
                "<file>: train: plateau_factor=<x> needs schedule='plateau', not '<schedule>'; remove plateau_factor",
                "Only the plateau schedule has a factor and a patience of its own.",
                "Leave it out, or train with `--train.schedule plateau`.",
                "stretto train run.toml --train.plateau_factor 0.1",
            ),
            ErrorCase(
                "<file>: train: average_start=<n> needs average='ema' or 'swa', not '<average>'; remove average_start",
                "Without an average, there is no first step of it.",
                "Leave it out, or train with `--train.average swa`.",
                "stretto train run.toml --train.average_start 2",
            ),
            ErrorCase(
                "<file>: train: average_start=<n> exceeds steps=<n>; start earlier",
                "The run would end before the average begins.",
                "Lower `train.average_start`, or raise `train.steps`.",
                "stretto train run.toml --train.average swa --train.average_start 99",
            ),
            ErrorCase(
                "<file>: train: warmup=<n> has no effect: one_cycle has a rise of its own; remove warmup",
                "The schedule `one_cycle` raises the learning rate over the first 30 % of the run.",
                "Remove `train.warmup`, or choose another schedule.",
                "stretto train run.toml --train.schedule one_cycle --train.warmup 2",
            ),
            ErrorCase(
                "--<field>=<value> should be true or false",
                "The field is true or false.",
                "Write `true` or `false`.",
                "stretto train run.toml --layout.elastic maybe",
            ),
            ErrorCase(
                "--layout.blocks: <value> is not a list of integers; separate them with commas, as in 5,1",
                "The field is a list with one integer for each stage.",
                "Write numbers with commas between them.",
                "stretto train run.toml --layout.blocks a,b",
            ),
            ErrorCase(
                "<file>: model: tied=true needs equal sizes, but the embedding has <n> features and the last recurrent layer <n>; "
                "set embedding=<n>, or projection",
                "A tied output layer uses the weight of the embedding, so both must have the same number of features.",
                "Leave out `model.embedding`, or set it, or `model.projection`, to that number.",
                "stretto train run.toml --model.tied true --model.embedding 7",
            ),
            ErrorCase(
                "<file>: model: projection=<n> must be less than hidden=<n>; make it smaller",
                "A projection reduces the size of the output.",
                "Lower `model.projection`, or leave it out.",
                "stretto train run.toml --model.projection 9",
            ),
        ),
    ),
    ErrorSection(
        "From a file to a run",
        "`stretto init` inspects samples of your files. What it can't decide, it asks, or reports as an error; see "
        "[Start from a file](../how-to/start-from-a-file.md).",
        (
            ErrorCase(
                "<path> does not exist; use the path of a file or a folder",
                "There is nothing at that path.",
                "Check the path, and the folder that you are in.",
                "stretto init nowhere.txt --out new.toml",
                DataError,
            ),
            ErrorCase(
                "<file> is empty; choose a different file",
                "An empty file holds no data.",
                "Check the path.",
                "stretto init empty.txt --out new.toml",
                DataError,
            ),
            ErrorCase(
                "--out=<file> already exists; choose a different file, or overwrite it with --force",
                "You may have edited the file, so it is not overwritten.",
                "Choose a different file, or add `--force`.",
                "stretto init book.txt",
            ),
            ErrorCase(
                "--out=<file>: the folder <folder> does not exist; create it first",
                "The file can't be written into a folder that does not exist.",
                "Create the folder, or choose a different file.",
                "stretto init book.txt --out nowhere/run.toml",
            ),
            ErrorCase(
                "--name=<name> is not valid; use letters, digits and -_.+, but not -.+ at the start",
                "The name becomes part of `data/NAME` and `runs/NAME`.",
                "Leave `--name` out, or use a plain name.",
                "stretto init book.txt --out new.toml --name a/b",
            ),
            ErrorCase(
                "--label=<field> is not a field of <file>; choose from <names>",
                "The records have no field of that name.",
                "Use one of the listed fields.",
                "stretto init songs.jsonl --out new.toml --label kind",
                DataError,
            ),
            ErrorCase(
                "--label=<field> and --no-label contradict each other; leave one of them out",
                "Either a field holds the label, or there is none.",
                "Leave one of them out.",
                "stretto init songs.jsonl --out new.toml --label mood --no-label",
            ),
            ErrorCase(
                "--targets=<column> is not a column of numbers; choose from <columns>",
                "Only numbers can be forecast.",
                "Use one of the listed columns.",
                "stretto init meters.csv --out new.toml --targets hours",
            ),
            ErrorCase(
                "--horizon is for series and sequences of channels, but the files hold <kind>; leave it out",
                "A text has no horizon.",
                "Leave it out; for a table, add `--kind series`.",
                "stretto init book.txt --out new.toml --horizon 3",
            ),
        ),
    ),
    ErrorSection(
        "Preparing data",
        "`stretto prepare` and the functions `prepare_text`, `prepare_sequences` and `prepare_series`; see "
        "[Train on records](../how-to/train-on-records.md). In Python, the messages name the parameter: "
        "`max_symbols=1` "
        "instead of `--max-symbols=1`.",
        (
            ErrorCase(
                "<path> is not a file; use the paths of text files",
                "There is nothing at that path, or it is a folder.",
                "Check the path; a pattern such as `*.txt` must match something.",
                "stretto prepare text nowhere.txt --out new",
                DataError,
            ),
            ErrorCase(
                "<path> is empty; leave it out",
                "An empty file is usually a mistake.",
                "Leave it out, or find out why it is empty.",
                "stretto prepare text empty.txt --out new",
                DataError,
            ),
            ErrorCase(
                "<path>: byte <n> is not UTF-8; convert the file, or use --level=byte",
                "Characters and words need UTF-8 text; bytes can be anything.",
                "Convert the file, as with `iconv -f LATIN1 -t UTF-8 FILE`, or read it as bytes.",
                "stretto prepare text latin.txt --out new --level char",
                DataError,
            ),
            ErrorCase(
                "<folder> already holds prepared data; choose a different folder, or delete it first",
                "Prepared data is never overwritten.",
                "Choose a different `--out`.",
                "stretto prepare text book.txt --out data",
                DataError,
            ),
            ErrorCase(
                "--validation-fraction=<x> is not in [0, 1); use a fraction such as 0.1",
                "It is the fraction of the data that is used for validation.",
                "Use a fraction, not a percentage.",
                "stretto prepare text book.txt --out new --validation-fraction 10",
                DataError,
            ),
            ErrorCase(
                "--level=<level> is not the given vocabulary's level, <level>; leave one of them out",
                "`--vocabulary` uses the symbols of other data, and so their level.",
                "Leave `--level` out.",
                "stretto prepare text book.txt --out new --vocabulary words --level char",
                DataError,
            ),
            ErrorCase(
                "--max-symbols=<n> has no effect on bytes; leave it out",
                "A vocabulary of bytes always has 256 symbols.",
                "Leave it out, or use `--level word`.",
                "stretto prepare text book.txt --out new --max-symbols 100",
                DataError,
            ),
            ErrorCase(
                "<path>: its suffix <suffix> is not one of <suffixes>; convert or rename it",
                "The ending of a file's name decides how it is read.",
                "Convert it to one of the listed formats.",
                "stretto prepare sequences book.txt --out new",
                DataError,
            ),
            ErrorCase(
                "<path>, row <n>: it has no <field>, only <fields>; fix it, or skip such rows with --bad-rows=skip",
                "A record lacks the field that the first one has.",
                "Fix the row, name a different field with `--sequence`, or skip such rows; their number is reported.",
                "stretto prepare sequences short.jsonl --out new",
                DataError,
            ),
            ErrorCase(
                "<path>, row <n>: it has no value in <field> (its fields are <fields>); name the field with "
                "--sequence=FIELD, as the rows after it can't be read either",
                "No option names the field with the sequence, and the first record has none of the usual ones.",
                "Use one of the listed fields.",
                "stretto prepare sequences meters.csv --out new",
                DataError,
            ),
            ErrorCase(
                "--columns=<name> is not a field of <path>; choose from <names>",
                "The file has no column of that name; `--time`, `--by`, `--sequence` and `--label` report it in the same way.",
                "Use one of the listed columns.",
                "stretto prepare series meters.csv --out new --columns load,humidity",
                DataError,
            ),
            ErrorCase(
                "<path>, row <n>: <column> has <value>, not a number; fix it, or skip such rows with --bad-rows=skip",
                "A channel of a series holds text; an empty cell would be a missing value.",
                "Fix the cell, or choose the channels with `--columns`.",
                "stretto prepare series broken.csv --out new --columns load",
                DataError,
            ),
            ErrorCase(
                "--columns=<columns> includes --time=<column>; leave it out of the columns",
                "A channel can't also be the time, or the name of the series.",
                "Remove it from `--columns`.",
                "stretto prepare series meters.csv --out new --columns load --time load",
                DataError,
            ),
            ErrorCase(
                "<file>: --static=<name> is both <x> and <x> in <series>; leave it out of static or, if these are several "
                "series, <what to do>",
                "A static column is constant within a series, such as the size of a shop.",
                "Leave the column out of `static`; or say with `by` which column tells the series apart.",
                "stretto prepare series meters.csv --out new --static load",
                DataError,
            ),
            ErrorCase(
                "--like=<folder> has tokens, not channels; use different data",
                "`--like` takes channels and statistics from other prepared series.",
                "Use a folder that `stretto prepare series` wrote.",
                "stretto prepare series meters.csv --out new --like plain",
                DataError,
            ),
            ErrorCase(
                "--workers=<n> must be at least 1",
                "It is the number of processes that read the files.",
                "Leave `--workers` out.",
                "stretto prepare text book.txt --out new --workers 0",
                DataError,
            ),
            ErrorCase(
                "--validation-fraction=<x> leaves no text for <folder>; use a different fraction, or 0 and a "
                "separate validation file",
                "Text is split at the start of a line, or of a word if lines are long, and there is too little text.",
                "Use more text, or a separate file: with `stretto init --valid`, or `stretto prepare text --vocabulary`.",
                "stretto prepare text line.txt --out new --validation-fraction 0.001",
                DataError,
            ),
            ErrorCase(
                "--max-symbols=<n> is too small, because <unk> counts as a symbol; use at least 2",
                "The symbol `<unk>`, for everything unknown, is always in the vocabulary.",
                "Use a larger number.",
                "stretto prepare text book.txt --out new --level word --max-symbols 1",
                DataError,
            ),
            ErrorCase(
                "<folder> already exists and is not an empty folder; choose a different one",
                "Existing files are never overwritten.",
                "Choose a different `--out`.",
                "stretto prepare text book.txt --out stuff",
                DataError,
            ),
            ErrorCase(
                "--on=spark is not supported; choose from ray, ray=HOST:PORT, ray://HOST:PORT, dask=HOST:PORT",
                "Parts are prepared by Ray or Dask, by the ranks of a launcher, or in Python by any executor.",
                "Choose one of these, or read Parquet files that Spark has written.",
                "stretto prepare text book.txt --out data/spark --on spark",
                DataError,
            ),
            ErrorCase(
                "<folder> is a folder, but not a saved Hugging Face dataset; use the paths of the files in it",
                "Folders are not searched for files; only what `save_to_disk` of Hugging Face datasets wrote is read as a whole.",
                "List the files, as in `FOLDER/*.jsonl`.",
                "stretto prepare sequences stuff --out new",
                DataError,
            ),
            ErrorCase(
                "<path>, row <n>: the line is not JSON (<reason>); fix it, or skip such rows with --bad-rows=skip",
                "A line of a JSONL file is not one JSON object.",
                "Fix the line, or skip such rows.",
                "stretto prepare sequences torn.jsonl --out new",
                DataError,
            ),
            ErrorCase(
                "no row can be read as a sequence (the first is <row>: <problem>); use different files or options",
                "With `--bad-rows skip`, all rows were skipped.",
                "Fix the problem of the first row, which the message gives; the others probably have the same problem.",
                "stretto prepare sequences torn.jsonl --out new --bad-rows skip",
                DataError,
            ),
            ErrorCase(
                "<path>, row <n>: <field> has a list of length <n> at a time step, but the data's first list has length <n>; fix "
                "it, or skip such rows with --bad-rows=skip",
                "Each time step of a sequence has one number for each channel.",
                "Write null where a number is missing.",
                "stretto prepare sequences ragged.jsonl --out new",
                DataError,
            ),
            ErrorCase(
                "<path>, row <n>: <field> has token <n>, which is negative; read the integers as numbers with "
                "--read-as=channels, or skip such rows with --bad-rows=skip",
                "Tokens are integers, starting at 0.",
                "Number the tokens from 0, or read the integers as numbers.",
                "stretto prepare sequences negative.jsonl --out new",
                DataError,
            ),
            ErrorCase(
                "--num-tokens=<n> has no effect on sequences of text; leave it out",
                "It is the vocabulary size of files that hold token numbers; text has a vocabulary of its own.",
                "Leave it out, or use `--max-symbols`.",
                "stretto prepare sequences songs.jsonl --out new --num-tokens 5",
                DataError,
            ),
            ErrorCase(
                "--like=<folder> has no labels; leave --label=<field> out",
                "`--like` takes the names of the labels from other data, which has none.",
                "Leave `--label` out, or use different data.",
                "stretto prepare sequences songs.jsonl --out new --like plain --label mood",
                DataError,
            ),
            ErrorCase(
                "<path>: the column name <name> is empty, repeated or not UTF-8; rename it",
                "A name in the first line of a CSV file appears twice, is empty, or is not UTF-8.",
                "Rename the column.",
                "stretto prepare series twice.csv --out new",
                DataError,
            ),
            ErrorCase(
                "<path> has a header but no rows; leave it out",
                "The file holds only the names of columns.",
                "Leave it out.",
                "stretto prepare series header.csv --out new",
                DataError,
            ),
            ErrorCase(
                "<path>, row <n>: a quote is opened in this row and never closed; fix the file",
                "The rest of the file would be one cell.",
                "Close the quote, or double it inside a cell.",
                "stretto prepare series quote.csv --out new",
                DataError,
            ),
            ErrorCase(
                "<path>, row <n>: a line or cell is longer than 128 MiB, or a quote is open; fix the file",
                "A file with such a line is probably not a table, and reading it could fill the memory.",
                "Close the quote, if it is open. Write long sequences to Parquet, or split them into several rows.",
                triggers.long_line,
                DataError,
            ),
            ErrorCase(
                "<path>, row <n>: <column> has NaN, NA or an infinity; fix it, read it as missing with --nan=missing, or "
                "skip such rows with --bad-rows=skip",
                "Such a value would make the mean and the standard deviation of the channel useless.",
                "Fix the value, or read it as missing with `--nan missing`.",
                "stretto prepare series infinite.csv --out new",
                DataError,
            ),
            ErrorCase(
                "<path>, row <n>: <column> is <value>, but the series of that name ended in a row above; sort the rows "
                "by <column> first (pandas: df.sort_values(<column>, kind='stable'))",
                "The rows of a series must follow each other.",
                "Sort the file by that column, then by time; a stable sort keeps the order in time.",
                "stretto prepare series mixed.csv --out new --by meter",
                DataError,
            ),
            ErrorCase(
                "<path>, row <n>: <column> is <value>, which is before <value> in the row above; sort the rows by "
                "time, "
                "or skip such rows with --bad-rows=skip",
                "Time decreases within a series.",
                "Sort the rows by time.",
                "stretto prepare series back.csv --out new --time hour",
                DataError,
            ),
            ErrorCase(
                "<path> has no column of numbers, only <columns>; choose channels with --columns=NAMES",
                "No column starts with a number.",
                "Choose the channels with `--columns`, or check the separator: it must be a comma.",
                "stretto prepare series names.csv --out new",
                DataError,
            ),
            ErrorCase(
                "<column> reaches <x>, where 32-bit floats are <x> apart: too coarse for its standard deviation of "
                "<x>; "
                "subtract an offset from it",
                "The values are large and close to each other, such as times in seconds; as 32-bit floats, many of them "
                "would be equal.",
                "Subtract the first value, or use differences.",
                "stretto prepare series far.csv --out new",
                DataError,
            ),
            ErrorCase(
                "tokenizer=<path> is not a file; use bpe:SIZE, or the path of a tokenizer.json",
                "`tokenizer` names a file that does not exist.",
                "Check the path, or train a tokenizer with a size, such as `bpe:8000`.",
                lambda: open_tokenizer("absent.json"),
                DataError,
            ),
            ErrorCase(
                "tokenizer=<value> has no size from <n> to <n>; use a size such as bpe:8000",
                "The 256 bytes are tokens too, so a vocabulary is larger than that.",
                "Choose a larger size.",
                lambda: open_tokenizer("bpe:100"),
                DataError,
            ),
        ),
    ),
    ErrorSection(
        "Reading data",
        "Errors when a run opens its data. Most of them begin with the config field of the data.",
        (
            ErrorCase(
                "data.train=<folder>: <folder> holds no prepared data (index.json is missing); <what to do>",
                "The folder was not made by `stretto prepare`. With `--validation-fraction`, the prepared folders are "
                "`train` and `valid` inside it.",
                "Use the prepared folder.",
                "stretto train run.toml --data.train stuff",
                DataError,
            ),
            ErrorCase(
                "data.train=<folder>: the folder <folder> does not exist; make it with `stretto prepare`",
                "There is no such folder. A relative path starts at the current folder, which the message names.",
                "Check the path, and the folder that you are in.",
                "stretto train run.toml --data.train nowhere",
                DataError,
            ),
            ErrorCase(
                "data.train=<file>: <file> is a file, not a folder of prepared data; make one with `stretto prepare`",
                "Training reads prepared data, not the files that it was made from.",
                "Prepare the file, and use the folder that `stretto prepare` or `stretto init` wrote.",
                "stretto train run.toml --data.train book.txt",
                DataError,
            ),
            ErrorCase(
                "<file> is damaged between bytes <n> and <n> (checksum mismatch); copy it again or prepare the data "
                "again",
                "The checksum of each page of a store is verified when the page is first read.",
                "Copy the file again. If it happens again, check the disk and the memory.",
                triggers.spoil_shard,
                DataError,
            ),
            ErrorCase(
                "data.train=<folder>: lanes=<n> x window=<n> needs <n> tokens per step, but <folder> has <n> to "
                "predict; use fewer lanes, a shorter window or more text",
                "The text is cut into `data.lanes` equal lanes; here a lane is shorter than one window.",
                "Lower `data.lanes` or `data.window`.",
                "stretto train run.toml --data.lanes 1000",
                DataError,
            ),
            ErrorCase(
                "layout.replicas=<n> x layout.micro_batches=<n> exceeds data.lanes=<n>; use fewer replicas or "
                "micro-batches, or more lanes",
                "Each micro-batch of each replica needs at least one lane.",
                "Raise `data.lanes`, or use fewer replicas or micro-batches.",
                "stretto train run.toml --layout.micro_batches 9",
                DataError,
            ),
            ErrorCase(
                "data.valid=<folder> differs from data.train=<folder> in its vocabulary; prepare it again with "
                "like=FOLDER (for text: vocabulary=FOLDER), the folder of the training data",
                "The same token number would mean a different symbol.",
                "Prepare the validation text with `--vocabulary FOLDER` (records: `--like FOLDER`), or take it from the "
                "training text with `--validation-fraction`.",
                "stretto train run.toml --data.valid words",
                DataError,
            ),
            ErrorCase(
                "data.valid=<folder> has <kind> as <inputs or targets>, but data.train=<folder> has <kind>; use data of "
                "the same kind",
                "A model for one kind can't be evaluated on the other.",
                "Use data that was prepared in the same way.",
                "stretto train run.toml --data.valid songs",
                DataError,
            ),
            ErrorCase(
                "data.feed='batches' needs sequences, but a corpus is a single long text; use lanes",
                "`stretto prepare text` writes one stream; batches are made of sequences.",
                "Leave `data.feed` out, or prepare the text with `stretto prepare sequences`.",
                "stretto train run.toml --data.feed batches",
            ),
            ErrorCase(
                "data.<field>=<value> has no effect <where>; leave it out",
                "The field applies to a different feed, or to a different kind of data.",
                "Leave it out.",
                "stretto train run.toml --data.horizon 3",
            ),
            ErrorCase(
                "data.train=<folder>: <sequence> has <n> time steps, more than data.budget=<n>; raise the budget, or split "
                "long sequences before you prepare them",
                "A batch holds at most `data.budget` time steps, and one sequence alone is longer.",
                "Raise `data.budget` to the length of the longest, if memory allows; see "
                "[Batch sequences of different lengths](../how-to/batch-sequences-of-different-lengths.md).",
                "stretto train songs.toml --data.budget 5",
                DataError,
            ),
            ErrorCase(
                "data.train=<folder>: no series has the <n> + <n> time steps of context and horizon (the longest has <n>); "
                "use a shorter context or horizon",
                "A forecast needs `data.context` time steps as input and `data.horizon` as targets.",
                "Lower `data.context` or `data.horizon`, or give longer series.",
                "stretto train meters.toml --data.context 400",
                DataError,
            ),
            ErrorCase(
                "data.train=<folder>: season=<n> is shorter than horizon=<n>, so the value one season earlier is not "
                "known yet; use a multiple of the season that is at least the horizon",
                "A target is the difference from the value one season earlier, which must be known when the forecast is made.",
                "Set `data.season` to a multiple of the season that is at least `data.horizon`, or to 0.",
                "stretto train meters.toml --data.season 4 --data.horizon 9",
                DataError,
            ),
            ErrorCase(
                "data.train=<folder>: target <name> is not a channel of <folder>; choose from <names>",
                "`data.targets` lists the channels to predict.",
                "Use one of the listed names.",
                "stretto train meters.toml --data.targets heat",
                DataError,
            ),
            ErrorCase(
                "data.train=<folder>: known_future and static name all numbers, so nothing is left to forecast; name fewer",
                "What is known ahead of time is an input only.",
                "Leave the channels that you want to forecast out of `data.known_future` and `data.static`.",
                "stretto train meters.toml --data.known_future load",
                DataError,
            ),
            ErrorCase(
                "data.train=<url>: <url> needs a package that is not installed (<package>); <what to do>",
                "Object storage is read through fsspec, which needs a package for each kind of storage.",
                "Install the package; for S3, Google Cloud, Azure and HTTP, the message gives the command, such as `pip install -e '.[s3]'` in a clone.",
                "stretto train run.toml --data.train gs://bucket/data",
                DataError,
            ),
            ErrorCase(
                "data.train=<url>: <url> is not a supported URL (<reason>); use a folder or a different URL",
                "The protocol in front of `://` is not known.",
                "Check the spelling, as in `s3://bucket/folder`.",
                "stretto train run.toml --data.train nowhere://bucket/data",
                DataError,
            ),
            ErrorCase(
                "data.feed='forecast' needs data.context; set it to how many time steps the network sees",
                "A forecast is made from the `data.context` time steps before it.",
                "Set `data.context`.",
                "stretto train songs.toml --data.train meters --data.feed forecast",
            ),
            ErrorCase(
                "data.train=<folder>: season=<n> exceeds context=<n>; use a longer context",
                "The value one season earlier lies before the network's inputs.",
                "Raise `data.context`, or lower `data.season`.",
                "stretto train meters.toml --data.season 96",
                DataError,
            ),
            ErrorCase(
                "--data.cache_bytes=<n> should be greater than or equal to 8388608",
                "The cache of remote pages holds at least 8 MiB.",
                "Raise it, or leave it out.",
                "stretto train run.toml --data.cache_bytes 5",
            ),
        ),
    ),
    ErrorSection(
        "The model, the layout and the device",
        "What a network, a layout or the machine can't do. See [Write a block](../how-to/write-a-block.md) and "
        "[The wavefront](../concepts/wavefront.md).",
        (
            ErrorCase(
                "layout.stages=<n> exceeds the model's number of blocks; use at most <n>",
                "A stage holds at least one block.",
                "Use fewer stages; or `model.layers_per_block = 1`, so that each layer is a block.",
                "stretto train run.toml --layout.stages 9",
                PlanError,
            ),
            ErrorCase(
                "layout.blocks=[<numbers>] has <n> blocks in total, but the model has <n>; make the numbers sum to <n>",
                "Every block belongs to one stage.",
                "Leave `layout.blocks` out once: `stretto train` then prints the blocks of the model, and those of each stage.",
                "stretto train run.toml --layout.stages 2 --layout.blocks 1,1",
                PlanError,
            ),
            ErrorCase(
                "layout.chunks=<n> exceeds data.window=<n>; use fewer chunks",
                "A chunk has at least one time step.",
                "Use fewer chunks; `stretto plan` says how many are best.",
                "stretto train run.toml --layout.chunks 99",
            ),
            ErrorCase(
                "torch finds no GPU, so there is nothing to check; `stretto doctor` says why, and "
                "`stretto doctor --gpu --backend strict` runs the checks on CPUs",
                "`stretto doctor --gpu` checks GPUs.",
                "If the machine has GPUs, `stretto doctor` says why torch does not find them. Else use `--backend strict`: the same checks on CPU ranks that follow NCCL's rules.",
                "stretto doctor --gpu",
            ),
            ErrorCase(
                "device=<name> (run.device in a config) is not a device of this machine; use auto or cpu",
                "Torch does not find this device.",
                'Run `python -c "import torch; print(torch.cuda.is_available())"`, which says whether torch sees a GPU.',
                "stretto train run.toml --run.device cuda",
            ),
            ErrorCase(
                "device=<name> (run.device in a config) is one device, but <n> ranks were started on this machine; use "
                "<type>, so that each rank has its own",
                "The name has an index, as in `cuda:1`, so all ranks would share this device, which NCCL rejects.",
                "Leave out the index; or use a layout of one rank.",
                triggers.two_ranks_on_one_device,
            ),
            ErrorCase(
                "model.factory=<spec> does not name an object; write it as file.py:name or package.module:name",
                "The field names a file or a module and, after a colon, a function in it.",
                "Add the colon and the name.",
                "stretto train run.toml --model.factory models.py",
            ),
            ErrorCase(
                "model.factory=<spec> can't be imported (<reason>); fix it, or choose a different one",
                "The file does not exist, or its import failed.",
                "Check the path, which is relative to the current folder; `python FILE` shows an error of the file itself.",
                "stretto train run.toml --model.factory nowhere.py:model",
            ),
            ErrorCase(
                "model.factory=<spec> needs a module that is not installed (<reason>); install it, or add its folder to "
                "PYTHONPATH",
                "Modules are imported from the installed packages and `PYTHONPATH`, not from the current folder.",
                "Name a file by its path, as `file.py:name`; a module that it imports must be installed, or be in a folder "
                "of `PYTHONPATH`.",
                "stretto train run.toml --model.factory nowhere:model",
            ),
            ErrorCase(
                "model.factory=<spec>: <file> has no <name>; use a name that it defines",
                "The file was imported, but defines no such name.",
                "Check the name after the colon.",
                "stretto train run.toml --model.factory models.py:nothing",
            ),
            ErrorCase(
                "model.factory=<spec> gives an object of type <type>; name a function that returns a stretto.nn.Stack",
                "A model that can be cut into stages is a `Stack` of blocks.",
                "Make each part a block, with `Pointwise` if it treats each time step independently; see "
                "[Write a block](../how-to/write-a-block.md).",
                "stretto train run.toml --model.factory models.py:not_a_stack",
            ),
            ErrorCase(
                "model.factory=<spec> failed (<reason>); fix the function, which is called with a stretto.data.Task",
                "Your function raised an exception, which is given in parentheses.",
                "Call it in Python with `stretto.data.Task.language(256)` to see the traceback.",
                "stretto train run.toml --model.factory models.py:fails",
            ),
            ErrorCase(
                "model.loss=<spec>: the loss <name> returned an object of type <type>; return "
                "stretto.nn.LossSum(total, count), the sum over all targets and their number, not a mean",
                "Means of ranks, micro-batches and chunks can't be combined; sums and counts can.",
                "Return `LossSum(total, count)`; see [Use a custom loss](../how-to/use-a-custom-loss.md).",
                "stretto train run.toml --model.loss models.py:mean",
            ),
            ErrorCase(
                "the model has a block that looks ahead in time (causal=False), but lanes carry state from window to "
                "window; use causal blocks",
                "A bidirectional block needs the whole sequence, and a lane has no end.",
                "Use causal blocks, or data of whole sequences (`stretto prepare sequences`).",
                "stretto train run.toml --model.factory models.py:two_sided",
            ),
            ErrorCase(
                "layout.spans=<n> can't carry state from window to window; use windows whose rows all start fresh, such "
                "as Batches, or layout.stages with layout.chunks",
                "Lanes continue from window to window. With spans, only the last rank has the state at the window's end, "
                "and does not send it to the first, which starts the next window.",
                "Use stages and chunks, or data of whole sequences (`stretto prepare sequences`).",
                "stretto train run.toml --model.cell mingru --layout.spans 2",
            ),
            ErrorCase(
                "<name> (<type>) has weights but no reset_parameters() to draw them with; add that method",
                "Initial weights depend on the seed and the name of the module, so that they are equal in every "
                "layout.",
                "Write `reset_parameters(self)`, which fills the module's own parameters.",
                lambda: initialize(Stack([Pointwise(triggers.WithoutReset())]), seed=1),
            ),
            ErrorCase(
                "a weight of this part of a model is tied to one of <name>, which is outside it; pass model=... to initialize, the complete model",
                "A tied weight is drawn by the module of its first name, and this slice of the model does not contain that module.",
                "Use `initialize(model[2:], seed, model=model)`.",
                triggers.tied,
            ),
            ErrorCase(
                "a Stack has no blocks; give it at least one block",
                "The list of blocks is empty.",
                "Check the code that makes the list.",
                lambda: Stack([]),
            ),
            ErrorCase(
                "block <n> is of type <type>, not a stretto.nn.Block; wrap a module that treats each time step "
                "independently in stretto.nn.Pointwise, or subclass stretto.nn.Block",
                "Blocks take `(x, state)` and return `(y, state)`; a plain module takes only `x`.",
                "Use `Pointwise(nn.ReLU())`, or write your own block.",
                lambda: Stack([nn.ReLU()]),  # type: ignore[list-item]
            ),
            ErrorCase(
                "Dropout probability=<x> is not in [0, 1); use a value such as 0.2",
                "It is the fraction of the features that is zeroed.",
                "Use a fraction, not a percentage.",
                lambda: Dropout(20),
            ),
            ErrorCase(
                "Residual adds a block's input to its output, but <type> turns <n> features into <n>; make them equal",
                "Tensors with different numbers of features can't be added.",
                "Give the block as many outputs as inputs, or put a `Linear` in front.",
                lambda: Residual(LSTM(3, 4))(torch.zeros(2, 1, 3), (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))),
            ),
            ErrorCase(
                "block <n> (<type>) takes <n> features, but block <n> (<type>) gives <n>; make them equal",
                "The output of a block is the input of the next one.",
                "Give both the same number of features; a block's index is counted from 0.",
                lambda: make_engine(Stack([LSTM(3, 4), Linear(5, 1)]), SquaredError(), seed=1),
            ),
            ErrorCase(
                "block <n> (<type>) takes <n> features, but the data has <n>; make them equal",
                "The first block reads the data.",
                "Use `windows.task.num_inputs` for the first block.",
                lambda: Trainer(
                    make_engine(Stack([LSTM(3, 4)]), SquaredError(), seed=1),
                    Batches(from_arrays(np.zeros((2, 3, 1)), np.zeros((2, 4))), max_rows=2),
                    TrainConfig(steps=1),
                ),
            ),
            ErrorCase(
                "block <n> (<type>) takes <n> tokens, but the data's vocabulary has <n>; use task.num_inputs",
                "The vocabulary is larger than the Embedding.",
                "Use `windows.task.num_inputs` for the Embedding.",
                lambda: Trainer(
                    make_engine(Stack([Embedding(3, 4), Linear(4, 9)]), CrossEntropy(), seed=1),
                    Batches(from_arrays(np.full((2, 3), 8)), max_rows=2),
                    TrainConfig(steps=1),
                ),
            ),
            ErrorCase(
                "targets have the class <n>, but the model has <n> outputs, counted from 0; give it one per class, or use "
                "<n> where a target is missing",
                "A target is out of range. On a GPU, torch raises a device-side assert instead.",
                "Use `windows.task.num_outputs` for the last block.",
                lambda: CrossEntropy()(torch.zeros(1, 1, 3), torch.full((1, 1), 3)),
                DataError,
            ),
            ErrorCase(
                "the loss <name> returned an object of type Tensor; return stretto.nn.LossSum(total, count), the sum over all "
                "targets and their number, not a mean",
                "Means of ranks, micro-batches and chunks can't be combined; sums and counts can.",
                "Return `LossSum(total, count)`, or use one of torch's modules, such as `nn.MSELoss()`; see "
                "[Use a custom loss](../how-to/use-a-custom-loss.md).",
                lambda: make_engine(Stack([Linear(2, 2)]), triggers.tensor_loss, seed=1),  # type: ignore[arg-type]
            ),
            ErrorCase(
                "targets are <n> floats per row, and inputs have <n> time steps, which could mean values_per_row or "
                "values_per_step; set target_kind",
                "The shape of the targets does not say what they are.",
                "Pass `target_kind`; see [Train on arrays](../how-to/train-on-arrays.md#targets).",
                lambda: from_arrays(np.zeros((2, 3, 1)), np.zeros((2, 3))),
                DataError,
            ),
            ErrorCase(
                "targets has <n> in row <n>, but there are only <n> classes, counted from 0",
                "A class is too large for `classes`. Rows that are read later are checked too.",
                "Count classes from 0, or pass the right `classes`.",
                lambda: from_arrays(np.zeros((2, 3, 1)), np.array([0, 2]), classes=2),
                DataError,
            ),
            ErrorCase(
                "targets have the class <name> in row <n>, which is not one of classes=<names>; add it",
                "A text in the targets is not the name of a class.",
                "Correct the target, or add the name to `classes`.",
                lambda: from_arrays(np.zeros((2, 3, 1)), ["a", "b"], classes=["a"]),
                DataError,
            ),
            ErrorCase(
                "classes=<n> is a number, but targets are text; give the names of all classes",
                "The number does not say which class a text is.",
                "Pass the names, or leave `classes` out if each occurs in the data.",
                lambda: from_arrays(np.zeros((2, 3, 1)), ["a", "b"], classes=2),
                DataError,
            ),
            ErrorCase(
                "inputs has <n> in row <n>; count tokens from 0, and pass lengths if rows are padded",
                "A token is negative. -100 is only for targets.",
                "Number the tokens from 0. Pad with any token, and pass `lengths`.",
                lambda: from_arrays(np.array([[1, 2, -100]])),
                DataError,
            ),
            ErrorCase(
                "quantiles=(<x>) are not all between 0 and 1; use values such as 0.1, 0.5, 0.9",
                "A quantile is a fraction, not a percentage.",
                "Divide by 100.",
                lambda: QuantileLoss((10, 50, 90)),
            ),
            ErrorCase(
                "outputs [<shape>] and targets [<shape>] differ in shape; make them equal",
                "The last block does not have as many outputs as there are targets.",
                "Give the last block as many outputs as there are targets.",
                lambda: SquaredError()(torch.zeros(2, 3, 1), torch.zeros(2, 3, 2)),
            ),
            ErrorCase(
                "<block> breaks the chunk law: when <how it was run>, <what> differs by <x>; <what to do>",
                "`check_chunk_law` ran the block on parts of the input and got different numbers than on the whole.",
                "Follow the end of the message; [The three laws](../concepts/laws.md) explains the chunk law.",
                lambda: testing.check_chunk_law(triggers.HiddenStateBlock(), torch.randn(6, 2, 3)),
                LawError,
            ),
            ErrorCase(
                "model.factory=<spec> begins with an Embedding of <n> tokens, but the data's vocabulary has <n>; use "
                "task.num_inputs",
                "A token of the data would have no vector.",
                "Use `task.num_inputs` for the Embedding; `task` is what the function is called with.",
                "stretto train run.toml --model.factory models.py:few",
            ),
            ErrorCase(
                "model.factory=<spec> ends with a Linear that has <n> outputs, but the data needs <n>; use task.num_outputs",
                "The data needs one output for each token, class or target value.",
                "Use `task.num_outputs` for the Linear; `task` is what the function is called with.",
                "stretto train run.toml --model.factory models.py:narrow",
            ),
            ErrorCase(
                "model.loss=<spec>: loss is an object of type <type>, not a function; return "
                "stretto.nn.LossSum(total, count), the sum over all targets and their number, not a mean",
                "The name is not a function.",
                "Name a function that returns a `LossSum`; see [Use a custom loss](../how-to/use-a-custom-loss.md).",
                "stretto train run.toml --model.loss models.py:number",
            ),
            ErrorCase(
                "the target of a row is at its last time step, where the backward direction of <block> has read "
                "only that step; add stretto.nn.FinalStates, MeanPool or MaxPool after it",
                "A bidirectional block is the last that reads the row, and its backward direction ends at the row's "
                "first time step.",
                "Add a summary; see [Summarize sequences](../how-to/summarize-sequences.md).",
                lambda: check_row_summary(find_unsummarized(Stack([BidirectionalLSTM(2, 2), Linear(4, 2)]))),
            ),
            ErrorCase(
                "the model makes one output of each <n> time steps (stride=<n>), but the data has targets (<name>) at "
                "every time step; leave out the strided blocks, or use targets of whole rows",
                "A strided block (`model.stack_frames`) leaves no output for each target.",
                "Use strided blocks for a sequence of targets per row, or one target; see "
                "[Strided blocks](../how-to/write-a-block.md#strided-blocks).",
                lambda: check_row_loss(None, Task("channels", 2, "class_per_step", 2), is_stateful=False, stride=2),
            ),
            ErrorCase(
                "model.stack_frames=<n> joins channels, but the data has tokens; remove it",
                "Tokens are not features that can be joined.",
                "Remove `model.stack_frames`.",
                lambda: build_network(ModelConfig(stack_frames=2), Task("tokens", 9, "class_per_row", 2)),
            ),
            ErrorCase(
                "model.tied=true needs a language model, whose outputs are the next token, but this data's targets are <name>; "
                "remove it",
                "The output layer of a tied model has one output for each token of the embedding.",
                "Use `model.tied` only for text without labels.",
                lambda: build_network(ModelConfig(tied=True), Task("tokens", 9, "class_per_row", 2)),
            ),
            ErrorCase(
                "model.bidirectional=true would read ahead what it must predict (the next token); use it for labels",
                "The network would see its targets, because they are later inputs.",
                "Use `model.bidirectional` only for data with labels.",
                "stretto train run.toml --model.bidirectional true",
            ),
            ErrorCase(
                "model.pooling='mean' summarizes a row for its label, but this data has targets at every time step; "
                "remove it",
                "Only labels are asked once per row.",
                "Remove `model.pooling`.",
                "stretto train run.toml --model.pooling mean",
            ),
            ErrorCase(
                "<block> is not a stretto.nn.Block; subclass Block, so that it has an initial state",
                "`check_chunk_law` was given a plain module.",
                "Subclass `stretto.nn.Block`; see [Write a block](../how-to/write-a-block.md#your-own-block).",
                lambda: testing.check_chunk_law(nn.ReLU(), torch.zeros(2, 2, 2)),  # type: ignore[arg-type]
                LawError,
            ),
            ErrorCase(
                "<block> declares causal=False: it looks ahead, so it is never split in time; check a causal block",
                "The chunk law does not apply to a block that looks ahead.",
                "Nothing, if the block is meant to look ahead.",
                lambda: testing.check_chunk_law(BidirectionalLSTM(2, 2), torch.zeros(2, 2, 2)),
                LawError,
            ),
            ErrorCase(
                "the loss is not a sum over <axis>: two parts give <x> over <n> targets, the whole <x> over <n>; "
                "return a sum "
                "and a count, never a mean",
                "`check_loss` split a batch in two, and the losses of the parts do not sum to that of the whole.",
                "Return `LossSum(total, count)`; see [Use a custom loss](../how-to/use-a-custom-loss.md).",
                lambda: testing.check_loss(triggers.mean_loss, torch.ones(4, 4), torch.ones(4, 4)),
                LawError,
            ),
            ErrorCase(
                "<loss> is a loss over whole rows, but lanes continue from window to window, so no window has a whole row; "
                "use windows without state, such as Batches (data.feed='batches')",
                "CTC and the CRF need all time steps of a row at once.",
                "Set `data.feed` to `batches`, or pass the trainer `Batches`.",
                lambda: check_row_loss(CTCLoss(), Task("channels", 2, "sequence_per_row", 4), is_stateful=True),
            ),
            ErrorCase(
                "the data's targets are <kind>, which have a length of their own, but the loss is one of single time "
                "steps; use a loss over whole rows, such as stretto.nn.CTCLoss (model.loss='ctc')",
                "A target such as a transcript has no time steps of its own, which cross-entropy needs.",
                "Use CTC.",
                lambda: check_row_loss(None, Task("channels", 2, "sequence_per_row", 4), is_stateful=False),
            ),
            ErrorCase(
                "CTCLoss takes a sequence of targets per row, but the data's targets are <kind>; use "
                "target_kind='sequence_per_row'",
                "CTC learns where the symbols of a row are; targets at time steps say so already.",
                "Prepare the targets as sequences, or use cross-entropy.",
                lambda: check_row_loss(CTCLoss(), Task("channels", 2, "class_per_step", 4), is_stateful=False),
            ),
            ErrorCase(
                "CRF(<n>) needs an output per tag, but the model has <n>; make them equal",
                "The last block of the model and the CRF have different numbers of tags.",
                "Give both the number of tags, `task.num_outputs`.",
                lambda: CRF(3).check_width(4),
            ),
            ErrorCase(
                "layout.vocab_parallel=true needs CrossEntropy without class_weights and label_smoothing as loss; leave "
                "it out",
                "The stages share the work of the output layer only for this loss.",
                "Leave out `layout.vocab_parallel`, or the weights and the smoothing.",
                lambda: check_vocab_parallel(Stack([Linear(2, 4)]), CrossEntropy(label_smoothing=0.1), 2),
            ),
        ),
    ),
    ErrorSection(
        "Plans",
        '`stretto plan`, `stretto profile` and `layout = "auto"`; see [The planner](../concepts/planner.md).',
        (
            ErrorCase(
                "--devices=<n> is not a multiple of --nodes=<n>; count the devices of all nodes",
                "`--devices` is the total of all nodes.",
                "Use a multiple of `--nodes`.",
                "stretto plan run.toml --hardware a100 --devices 3 --nodes 2",
                PlanError,
            ),
            ErrorCase(
                "--hardware=<name> is unknown; choose from <names>, or write a profile by hand",
                "stretto has no data sheet of this device.",
                "Use one of the listed devices, or a profile: measure it with `stretto profile`, or write it by hand.",
                "stretto plan run.toml --hardware a1",
                PlanError,
            ),
            ErrorCase(
                "--profile=<file> is not a file; create it with `stretto profile --out`",
                "A plan can be made from a profile that was measured elsewhere.",
                "Run `stretto profile run.toml --out profile.json` on the machine that will train.",
                "stretto plan run.toml --profile nowhere.json",
            ),
            ErrorCase(
                "--memory=<text> is not a valid number with a unit; write it like 24GB",
                "It is the memory of one device.",
                "Write a number and KB, MB, GB or TB.",
                "stretto plan run.toml --hardware a100 --memory much",
            ),
            ErrorCase(
                "no layout is possible with --devices=<n> (<reasons>); <what to do>",
                "In every layout some rank would need more memory than a device has.",
                "Follow the end of the message: more devices, more memory, or a smaller model; a smaller batch or window "
                "helps too.",
                "stretto plan run.toml --hardware a100 --devices 1 --memory 1KB",
                PlanError,
            ),
            ErrorCase(
                "--json=<file> can't be written (<folder> does not exist); choose a different file",
                "The path is checked before minutes are spent on measuring.",
                "Create the folder first.",
                "stretto plan run.toml --hardware a100 --json nowhere/plan.json",
            ),
            ErrorCase(
                "--inter-node-link=<text> is not a latency and a bandwidth; write it like 5us,25GB/s",
                "The option describes a link that can't be measured here.",
                "Write the latency, a comma, and the bandwidth in bytes per second.",
                "stretto plan run.toml --hardware H100 --devices 16 --nodes 2 --inter-node-link slow",
            ),
            ErrorCase(
                "--hardware=<name> and --profile=<file> both choose the profile; leave one out",
                "One is estimated from a data sheet, the other was measured.",
                "Leave one of them out.",
                "stretto plan run.toml --hardware H100 --profile profile.json",
            ),
            ErrorCase(
                "--try=<n> runs layouts on this machine, but <option> plans for another; leave out one or the other",
                "Layouts can be tried only on the devices that the plan is for.",
                "Leave out `--try`, or plan for this machine: without `--hardware` and `--nodes`.",
                "stretto plan run.toml --hardware H100 --try 3",
            ),
            ErrorCase(
                "<file> is not a valid profile: <reason>; make it with `stretto profile`",
                "The file is not JSON, or not what `stretto profile` writes.",
                "Measure again: `stretto profile run.toml --out FILE`.",
                "stretto plan run.toml --profile book.txt",
                PlanError,
            ),
        ),
    ),
    ErrorSection(
        "Starting ranks, and losing them",
        "What ranks report about each other. Exit code 75 means that the run can resume; see "
        "[Survive failures](../how-to/survive-failures.md).",
        (
            ErrorCase(
                "the layout needs <n> ranks, but the job has <n>; start <n> (torchrun --nproc-per-node <n>), change the "
                "layout, or set layout.elastic",
                "Under torchrun, or in a script of your own, the number of ranks must be replicas x stages.",
                "Start as many as the message says; without a launcher, `stretto train` starts all of them on this "
                "machine.",
                lambda: triggers.start_world(2),
                MeshError,
            ),
            ErrorCase(
                "the layout needs <n>, but <n> nodes with <n> each have <n>; change the layout or the number of nodes, "
                "or set layout.elastic",
                "A manifest for Kubernetes has one rank per GPU of each node.",
                "Make replicas x stages equal to the number of GPUs; or set `--ranks-per-node`.",
                "stretto manifest jobset run.toml --image stretto:1 --nodes 3",
            ),
            ErrorCase(
                "run.folder=<folder> would be lost with its pod; pass --volume=CLAIM:/PATH, or set save.to to a URL",
                "What a pod writes into its own files ends with it, so the run could not resume.",
                "Pass `--volume` with a claim that all pods share, and set `run.folder` to a folder in it.",
                "stretto manifest jobset run.toml --image stretto:1 --gpus-per-node 0",
            ),
            ErrorCase(
                "the environment has RANK but no <variable>; start the ranks with torchrun, which sets both",
                "Only some of torchrun's variables are set, maybe left over from another command.",
                "`unset RANK`, or start with torchrun.",
                triggers.environment,
                MeshError,
            ),
            ErrorCase(
                "rank <n> did not join within <n> s; check its output, or raise the timeout",
                "Not all ranks found each other within `run.timeout`.",
                "Check whether the rank was started, and whether its host can reach the first one.",
                lambda: rendezvous(SignedStore(HashStore()), 0, 2, timedelta(seconds=0.1)),
                LostPeerError,
            ),
            ErrorCase(
                "rank <n> sent no message for <n> s; check that rank's output, or raise run.timeout",
                "A rank is alive, but has not reached the point where others wait for its message.",
                "If its work takes that long, raise `run.timeout`; else find out what it is doing.",
                triggers.wait_for_message,
                LostPeerError,
            ),
            ErrorCase(
                "STRETTO_SECRET has <n> characters, so it can be guessed; set it to at least 16 random characters, the "
                "same on all nodes (openssl rand -hex 32)",
                "Ranks sign their messages with this secret.",
                "Set a random text, or leave it out: `stretto train` then creates a secret in the run's folder.",
                lambda: triggers.find_secret("password"),
            ),
            ErrorCase(
                "<folder>/secret holds the ranks' secret, so only you may have access to it, but it <reason>; delete it, "
                "or set STRETTO_SECRET on all nodes",
                "The permissions of the file have changed, or the run's folder is a copy of someone else's.",
                "Delete the file: the next launch creates a new one. If the file system has no permissions, set "
                "`STRETTO_SECRET`.",
                triggers.open_secret,
            ),
            ErrorCase(
                "rank <n> found no secret in <folder>/secret within <n> s, although rank 0 creates it; check rank 0's "
                "output, choose a folder that all nodes share, or set STRETTO_SECRET on all nodes",
                "Rank 0 was not started, or its node has a different folder with the same name.",
                "Start all ranks; set `run.folder` to a folder that all nodes share, or checkpoints can't be saved "
                "either.",
                triggers.missing_secret,
                LostPeerError,
            ),
            ErrorCase(
                "rank 0 and rank <n> have different secrets, or only one of them has a secret; set STRETTO_SECRET to the "
                "same text on all nodes, or on none",
                "The environment variable differs between nodes.",
                "Set it in one place for all nodes; with mpirun, add `-x STRETTO_SECRET`.",
                triggers.different_secrets,
                MeshError,
            ),
            ErrorCase(
                "<key> in the ranks' key-value store is not signed with this run's secret, so it is not from its ranks; "
                "find out who can connect to the store, then restart the run",
                "Another process has written to the store through which the ranks find each other.",
                "See [Network and security](../how-to/run-on-a-cluster.md#network-and-security).",
                triggers.forged_message,
                MeshError,
            ),
            ErrorCase(
                "rank <n> lost rank <n> (replica <n>, stage <n><last seen>) while <doing>; check that rank's output "
                "for the cause",
                "The other rank's connection broke: it was killed, or it failed first.",
                "Read what that rank printed. `stretto train` restarts all ranks from the newest checkpoint.",
                triggers.lost_peer,
                LostPeerError,
            ),
            ErrorCase(
                "rank <n> was killed by <signal>, so the other ranks were stopped; check whether the machine ran "
                "out of memory (dmesg)",
                "The system, or someone, killed a rank, and no restart was left.",
                "See `dmesg` for the out-of-memory killer; use more stages, micro-batches or `layout.recompute`; raise "
                "`run.max_restarts`.",
                triggers.killed,
                LostPeerError,
            ),
            ErrorCase(
                "these windows are already share <n> of <n>; pass the windows without calling share(): Trainer and "
                "evaluate take this replica's share themselves",
                "In your own script, `share` was called before the windows were passed to `Trainer` or `evaluate`.",
                "Pass the windows as they are.",
                triggers.share_twice,
                DataError,
            ),
        ),
    ),
    ErrorSection(
        "Training, saving and resuming",
        "Errors when a run starts, trains, saves or resumes; see "
        "[Train in a script](../how-to/train-in-a-script.md) and [Save and resume](../how-to/save-and-resume.md).",
        (
            ErrorCase(
                "train.optimizer=<name> is not a class of torch.optim; choose from <names>",
                "An optimizer is named as in torch.optim, in upper or lower case.",
                "Use one of the listed names. In a script, `Trainer(optimizer=...)` takes any optimizer.",
                "stretto train run.toml --train.optimizer lion",
            ),
            ErrorCase(
                "train.optimizer=<name> can't be used: it computes the loss several times per step, and needs all parameters on "
                "one rank; use adamw",
                "Ranks hold different parameters, and a step computes each gradient once.",
                "Use an optimizer that updates each parameter by itself.",
                "stretto train run.toml --train.optimizer lbfgs",
            ),
            ErrorCase(
                "train.optimizer=<name> can't be used: it has a schedule and an average of its own; use sgd with train.average='swa'",
                "ASGD's average of the weights is that of `train.average`, which works with every optimizer and schedule.",
                'Use `optimizer = "sgd"` and `average = "swa"`.',
                "stretto train run.toml --train.optimizer asgd",
            ),
            ErrorCase(
                "train.optimizer=<name> can't be used: it needs sparse gradients, but all gradients are dense here; use adam",
                "SparseAdam is for embeddings with `sparse=True`, which stretto does not use.",
                "Use `adam` or `adamw`.",
                "stretto train run.toml --train.optimizer sparseadam",
            ),
            ErrorCase(
                "train.optimizer='muon' can't be used: it updates matrices only, but a model has biases too; use adamw",
                "In torch, Muon accepts two-dimensional parameters only.",
                "Use another optimizer. In a script, a factory can give Muon the matrices of a model.",
                "stretto train run.toml --train.optimizer muon",
            ),
            ErrorCase(
                "train.options: <name> is not an option of <optimizer>; choose from <names>",
                "`train.options` are arguments of the optimizer's class in torch.optim.",
                "Correct the name, or choose the optimizer that has this option.",
                "stretto train run.toml --train.options '{momentum = 0.9}'",
            ),
            ErrorCase(
                "train.options: <name> is not an option of <optimizer>; set train.<name> instead",
                "The learning rate and the weight decay have fields of their own.",
                "Set `train.lr` or `train.weight_decay`.",
                "stretto train run.toml --train.options '{weight_decay = 0.1}'",
            ),
            ErrorCase(
                "train.options don't fit <optimizer> (<reason>); correct them",
                "Torch has rejected a value, for the reason in parentheses.",
                "Correct the value.",
                "stretto train run.toml --train.options '{betas = [2, 0.9]}'",
            ),
            ErrorCase(
                "train.weight_decay=<x> has no effect: <optimizer> has none; leave it out",
                "Rprop has no weight decay.",
                "Leave it out, or use another optimizer.",
                "stretto train run.toml --train.optimizer rprop --train.weight_decay 0.1",
            ),
            ErrorCase(
                "train.groups: match=<pattern> matches no parameter, or only those of earlier groups; use a pattern such as "
                "'*.bias*' or 'blocks.0.*'",
                "A group is for the parameters whose names in the whole model match its pattern, as in a shell; the first "
                "group that matches a name has it.",
                "Correct the pattern, or the order of the groups. `stretto show RUN` prints the names.",
                "stretto train run.toml --train.groups '[{match = \"head.*\", lr = 0.1}]'",
            ),
            ErrorCase(
                "run.folder=<folder> already holds a run; choose a different run.folder, or delete it",
                "`--resume never` was given, and the folder holds a run.",
                "Leave `--resume` out to resume that run, or choose a different folder.",
                "stretto train run.toml --run.folder runs/done --resume never",
            ),
            ErrorCase(
                "--resume=<text> is not auto, never, a URL or an existing path; use one of these",
                "There is no such checkpoint.",
                "Use the path of a checkpoint; `stretto show RUN` lists those of a run.",
                "stretto train run.toml --resume nowhere",
            ),
            ErrorCase(
                "<field>=<value>, but <checkpoint> was saved with <field>=<value>; set it back, or choose a different "
                "run.folder",
                "The folder holds a run with a different model or different batches. Layout and learning rate may "
                "change, but "
                "not this field.",
                "Set the field back, or start a new run in a different folder.",
                "stretto train run.toml --run.folder runs/done --model.hidden 16",
            ),
            ErrorCase(
                "data from <folder> is not the data that <checkpoint> was saved with, so the saved position means "
                "nothing; use the same data, or choose a different run.folder",
                "The data has changed since the checkpoint was saved, or it is other data.",
                "Use the same data; to train on other data from these weights, see "
                "[Fine-tune on other data](../how-to/fine-tune.md).",
                "stretto train run.toml --run.folder runs/done --data.train data/valid --data.lanes 4",
            ),
            ErrorCase(
                "run.folder=<folder> can't be written (<reason>); choose a different folder",
                "The folder can't be created, or is read-only, or the disk is full.",
                "Choose a folder that you may write to.",
                "stretto train run.toml --run.folder run.toml/run",
            ),
            ErrorCase(
                "<folder> is in use by <who>; <what to do>, or choose a different folder",
                "Two runs would write into one folder.",
                "Wait for the process that the message names, or stop it.",
                triggers.lock,
            ),
            ErrorCase(
                "<folder>: generation <n> of this run has taken over, so this one, generation <n>, stops; it has "
                "not changed the newer one's files",
                "The run was launched again, for example on another machine, while this launch was still running.",
                "Nothing: the newer launch continues.",
                triggers.fence,
                FencedError,
            ),
            ErrorCase(
                "stopped after step <n>, as requested; that step is saved, so start again to resume",
                "The run received SIGTERM or SIGUSR1.",
                "Start the same command again.",
                triggers.preempt,
                PreemptedError,
            ),
            ErrorCase(
                "step <n> has loss <x> and gradient norm <x>; the weights are still those of step <n>: lower "
                "train.lr=<x>, or raise "
                "train.warmup=<n>; the batch is in <file>",
                "A loss or a gradient is not finite. The weights were not changed.",
                'Follow the message; `train.nonfinite = "skip"` skips single bad batches.',
                "stretto train run.toml --train.optimizer sgd --train.lr 1e38 --train.clip 0",
                DivergedError,
            ),
            ErrorCase(
                "<tensor> has values that are not finite after step <n>, so this step was not saved; lower train.lr "
                "and start again: the run resumes from the previous checkpoint",
                "A checkpoint with such values is never written.",
                "Start again with a lower `train.lr`.",
                triggers.save_nan,
                DivergedError,
            ),
            ErrorCase(
                "save() was called before start(); call start() first, and resume from the checkpoint it returns",
                "In your own script, `CheckpointManager.start` was not called.",
                "Call `start()` once, before the first step.",
                triggers.save_first,
            ),
            ErrorCase(
                "<file> is damaged (<reason>); resume from a different checkpoint, or copy it again",
                "A file of the checkpoint has changed since it was written. No other checkpoint is used without your "
                "decision.",
                "Copy the file again, or resume from another checkpoint (`--resume PATH`); `stretto show RUN` lists them.",
                triggers.spoil_checkpoint,
                DataError,
            ),
            ErrorCase(
                "run.folder=<folder> holds a run with its checkpoints in its own folder, not in <folder>; leave "
                "save.to out, or choose a different run.folder",
                "Without its checkpoints, the run would start from scratch.",
                "Set `save.to` to what it was when the run was first started, or leave it out if it was not set.",
                "stretto train run.toml --run.folder runs/done --save.to elsewhere",
            ),
        ),
    ),
    ErrorSection(
        "Using a run",
        "`stretto eval`, `stretto show`, `stretto verify` and `stretto.load_model`.",
        (
            ErrorCase(
                "<path> does not exist; choose the folder of a run or of a checkpoint",
                "There is nothing at that path.",
                "Check the path; a run's folder is its `run.folder`.",
                "stretto eval nowhere",
                DataError,
            ),
            ErrorCase(
                "<path> holds no checkpoint; choose the folder of a run that has saved one",
                "The folder exists, but no run has saved a checkpoint in it.",
                "Wait for the first checkpoint (`save.every`, `save.minutes`), or use a different folder.",
                "stretto generate data",
                DataError,
            ),
            ErrorCase(
                "<run>@best does not exist: no checkpoint of the run has a finite validation loss or metric; train with "
                "data.valid and save.keep_best=true, or leave out @best",
                "Only with `save.keep_best` does a run keep its best checkpoint, and the validation loss of each.",
                "Train with `--save.keep_best true --run.eval_every N`, or use the last weights: the run without `@best`.",
                "stretto eval runs/done@best",
                DataError,
            ),
            ErrorCase(
                "<path> is one checkpoint, not a run; leave out @best",
                "`@best` chooses among the checkpoints of a run.",
                "Name the folder of the run, or the checkpoint without `@best`.",
                lambda: find_checkpoint(f"{triggers.newest()}@best"),
                DataError,
            ),
            ErrorCase(
                "loading <folder> would run Python code (model.factory=<spec>); set trust=True if you trust its author",
                "The config of the run names a Python file of its author, which loading would execute.",
                "If you trust the code, add `--trust` to the command, as in `stretto eval RUN --trust`.",
                triggers.load_untrusted,
            ),
            ErrorCase(
                "<file>: save.to refers to <location>, which is outside the folder; if you trust its author, open it with allowed_locations=<location>",
                "The files of the run say that its checkpoints are in another folder or at a URL, which would be opened with your credentials.",
                "If you trust the run, add `--allow-location URL` to the command, or use that URL in place of the run's folder.",
                triggers.load_from_elsewhere,
            ),
            ErrorCase(
                "<file> does not hold this model's weights (<reason>); copy or write it again, or use the model that it was saved from",
                "The file is not safetensors, or belongs to a different model.",
                "Copy it again; if the original is damaged too, load a checkpoint of the run instead.",
                triggers.spoil_weights,
                DataError,
            ),
            ErrorCase(
                "<file> is larger than <n> MiB, the limit for files of its kind; don't trust it",
                "A manifest, index, vocabulary or config of this size was not written by stretto, and reading it could fill the memory.",
                "Get the file from its author again.",
                triggers.oversize,
                DataError,
            ),
            ErrorCase(
                "<file> is not a regular file; don't trust it",
                "There is a pipe, a device or a folder in the place of a file.",
                "Get the folder from its author again.",
                triggers.pipe_index,
                DataError,
            ),
            ErrorCase(
                "<folder> differs from the run in its vocabulary; prepare it again with like=FOLDER (for text: "
                "vocabulary=FOLDER), the folder of the training data",
                "The same token number would mean a different symbol.",
                "Prepare the text with `--vocabulary FOLDER` (records: `--like FOLDER`), the folder that the run was trained on.",
                "stretto eval runs/done --data words",
                DataError,
            ),
            ErrorCase(
                "--steps=<n> compares nothing; use at least 1",
                "It is the number of steps that `stretto verify` compares.",
                "Leave `--steps` out.",
                "stretto verify run.toml --steps 0",
            ),
            ErrorCase(
                "block <n>: <type> breaks the chunk law: <how>; <what to do>",
                "`stretto verify` found that the layout computes different numbers because of this block.",
                "Fix the block as the message says.",
                "stretto verify run.toml --model.factory models.py:hides --layout.chunks 2",
                LayoutMismatchError,
            ),
        ),
    ),
    ErrorSection(
        "Predictions, generated text, forecasts, reports and exports",
        "`stretto predict`, `generate` and `forecast` ([Predict, generate, "
        "forecast](../how-to/predict-generate-forecast.md)), `report` ([Read the report](../how-to/read-the-report.md)), "
        "`export` ([Export to ONNX](../how-to/export-to-onnx.md)) and `import` ([Import Keras or PyTorch "
        "weights](../how-to/import-weights.md)).",
        (
            ErrorCase(
                "<run> was trained without data.valid; choose the data with --data=DATA",
                "By default, the predictions are for the validation data of the run, and it has none.",
                "Use `--data` with a prepared folder or a file.",
                "stretto predict runs/alone",
            ),
            ErrorCase(
                "--out=<file> already exists; choose a different path, or delete it",
                "Existing files are never overwritten.",
                "Choose a different file, or delete it.",
                "stretto predict runs/done --out book.txt",
            ),
            ErrorCase(
                "<folder> has results from a different model, data or settings; delete it, or choose a different file",
                "Interrupted predictions are resumed only by the same model with the same data and settings.",
                "Delete the folder of parts, or choose a different `--out`.",
                triggers.predict_beside_another,
            ),
            ErrorCase(
                "<folder> is a symbolic link; delete it, or choose a different file",
                "The folder of parts, which may have come with the run, leads to another folder, whose files would be deleted.",
                "Delete the link, or choose a different `--out`.",
                triggers.predict_through_link,
            ),
            ErrorCase(
                "--ranks=<n> must be at least 1",
                "It is the number of ranks that share the work.",
                "Leave it out, or use at least 1.",
                "stretto predict runs/done --ranks 0",
            ),
            ErrorCase(
                "<data> has <kind> as inputs, but the run has <kind>; use data of the same kind",
                "The model was trained on a different kind of data.",
                "Use data like that of the run.",
                "stretto predict runs/done --data meters --out new.jsonl",
                DataError,
            ),
            ErrorCase(
                "--temperature=<number> must be finite and at least 0; use a value such as 0.8",
                "A temperature can't be negative.",
                "Use 0 for the most likely token, 1 for the probabilities of the model.",
                "stretto generate runs/done --temperature -1",
            ),
            ErrorCase(
                "--top-p=<number> is not in (0, 1]; use a value such as 0.9",
                "It is a probability.",
                "Leave it out, or use a value such as 0.9.",
                "stretto generate runs/done --top-p 2",
            ),
            ErrorCase(
                "--length=<n> is less than 1; use at least 1",
                "There would be no text.",
                "Use at least 1.",
                "stretto generate runs/done --length 0",
            ),
            ErrorCase(
                "the run's model predicts next_token, not a horizon; use a run on series",
                "Only a model of series can forecast.",
                "Use `stretto generate` for text, `stretto predict` for labels.",
                "stretto forecast runs/done",
            ),
            ErrorCase(
                "<path> does not contain a run (config.toml and log.jsonl are missing); give the folder of a run "
                "(run.folder in its config)",
                "A report is made from the files of a run.",
                "Use the folder that `stretto train` prints, the run's `run.folder`.",
                "stretto report data",
            ),
            ErrorCase(
                "--out=<file> exists and is not an HTML page; choose a different file",
                "A report overwrites only other HTML pages, so that a typo can't destroy a log.",
                "Choose a different file.",
                "stretto report runs/done --out runs/done/log.jsonl",
            ),
            ErrorCase(
                "nothing to export; use --onnx=FILE, --torch=FILE or both",
                "The options choose the format.",
                "Use one of them, or both.",
                "stretto export runs/done",
            ),
            ErrorCase(
                "--onnx=<file> already exists; choose a different path, or delete it",
                "Existing files are never overwritten. The same applies to `--torch`, and to `stretto import`.",
                "Choose a different file, or delete it.",
                "stretto export runs/done --onnx book.txt",
            ),
            ErrorCase(
                "the content of <file> would take <n> bytes, more than the limit of <n> for a file of its size; don't trust it",
                "The file is small, but its content would fill the memory: it is compressed, or one number stands for a whole tensor.",
                "Save the weights again, without compression.",
                triggers.import_bomb,
                DataError,
            ),
        ),
    ),
)
