"""stretto trains recurrent networks across many GPUs, exactly: over replicas, over layers, and over time.

Names are imported when they are first used, so `import stretto` costs nothing and does not wake torch.
Type checkers read `__init__.pyi` beside this file.
"""

from importlib import import_module

__version__ = "0.1.0.dev0"

_HOMES = {
    "stretto.base.errors": (
        "ConfigError",
        "DataError",
        "DivergedError",
        "FencedError",
        "LawError",
        "LostPeerError",
        "MeshError",
        "PlanError",
        "StrettoError",
    ),
    "stretto.base.position": ("Position",),
    "stretto.base.state": ("State",),
    "stretto.base.task": ("Task",),
    "stretto.base.window": ("Rows", "Window"),
    "stretto.blocks.bidirectional": ("BidirectionalLSTM",),
    "stretto.blocks.block": ("Block",),
    "stretto.blocks.dropout": ("Dropout", "LockedDropout"),
    "stretto.blocks.initialize": ("initialize",),
    "stretto.blocks.losses": (
        "AbsoluteError",
        "Loss",
        "LossSum",
        "QuantileLoss",
        "SequenceLoss",
        "SquaredError",
        "TokenLoss",
        "last_step_targets",
    ),
    "stretto.blocks.pointwise": ("Embedding", "LayerNorm", "Linear", "Pointwise"),
    "stretto.blocks.recurrent": ("GRU", "LSTM"),
    "stretto.blocks.residual": ("Residual",),
    "stretto.blocks.stack": ("Stack",),
    "stretto.checkpoint.manager": ("CheckpointManager", "SaveReport"),
    "stretto.checkpoint.checkpoint": ("Checkpoint", "find_checkpoint"),
    "stretto.checkpoint.snapshot": ("Snapshot",),
    "stretto.config.layout": ("Layout",),
    "stretto.config.run": ("RunConfig",),
    "stretto.config.toml": ("load_config",),
    "stretto.config.train": ("TrainConfig",),
    "stretto.config.watch": ("WatchConfig",),
    "stretto.windows.batches": ("Batches",),
    "stretto.store.cache": ("Cache",),
    "stretto.store.corpus": ("Corpus",),
    "stretto.windows.documents": ("DocumentLanes",),
    "stretto.windows.forecast": ("Forecast",),
    "stretto.prepare.inspection": ("Inspection", "inspect_data"),
    "stretto.windows.items": ("NextTokenItems", "LabelledItems", "SlidingWindows"),
    "stretto.windows.lanes": ("Lanes",),
    "stretto.windows.loader": ("WindowSource", "read_ahead"),
    "stretto.prepare.prepare_text": ("prepare_text",),
    "stretto.prepare.file_listing": ("AmbiguousInputError",),
    "stretto.prepare.prepare_data": ("PreparedData", "prepare_data"),
    "stretto.prepare.prepare_sequences": ("prepare_sequences",),
    "stretto.prepare.prepare_series": ("prepare_series",),
    "stretto.store.sequences": ("Sequences",),
    "stretto.engine.build": ("make_engine",),
    "stretto.engine.engine": ("Engine", "StepResult"),
    "stretto.engine.local": ("LocalEngine",),
    "stretto.launch.doctor": ("diagnose",),
    "stretto.launch.finding": ("Finding",),
    "stretto.measure.workload": ("find_workload",),
    "stretto.measure.profile": ("measure_profile",),
    "stretto.mesh.world": ("World", "world"),
    "stretto.plan.advice": ("advise",),
    "stretto.planning.choose": ("LayoutChoice", "choose_layout"),
    "stretto.plan.cluster": ("Cluster",),
    "stretto.plan.profile": ("Link", "Profile", "load_profile", "save_profile"),
    "stretto.plan.search": ("Plan", "balance", "find_plan"),
    "stretto.serve.forecast": ("SeriesForecast", "forecast"),
    "stretto.serve.generate": ("Sampling", "generate", "generate_tokens"),
    "stretto.serve.predict": ("predict", "write_predictions"),
    "stretto.serve.sessions": ("Sessions",),
    "stretto.plan.trace": ("Trace",),
    "stretto.exchange.from_keras": ("from_keras",),
    "stretto.exchange.from_torch": ("from_torch",),
    "stretto.exchange.onnx_export": ("OnnxExport", "export_onnx"),
    "stretto.exchange.to_torch": ("export_torch",),
    "stretto.report.compare_page": ("compare_page",),
    "stretto.report.run_page": ("run_page",),
    "stretto.train.evaluate": ("Evaluation", "evaluate"),
    "stretto.train.plan_check": ("PlanReport",),
    "stretto.train.rank_monitor": ("RankReport", "RankMonitor"),
    "stretto.train.run": ("EvaluationReport", "PreemptedError", "Run"),
    "stretto.train.trace": ("gather_trace",),
    "stretto.train.sinks.sinks": ("Sinks", "open_sinks"),
    "stretto.train.suggest": ("Suggestion", "suggest"),
    "stretto.train.trained_model": ("TrainedModel", "load"),
    "stretto.train.weights": ("load_weights", "save_weights"),
    "stretto.train.trainer": ("StepReport", "Trainer", "Request"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*_HOME_OF]


def __getattr__(name: str) -> object:
    if name == "testing":
        return import_module("stretto.testing")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
