"""TfConfig: the part of `TF_CONFIG` that describes a cluster. Imported only if it is set: pydantic imports slowly."""

from pydantic import BaseModel


class TfTask(BaseModel):
    """This process: one of the tasks of the cluster."""

    type: str = "worker"
    index: int = 0


class TfConfig(BaseModel):
    """TensorFlow's description of a cluster, and of this process's task in it."""

    cluster: dict[str, list[str]] = {}  # addresses `host:port` by task type: chief, worker, ...
    task: TfTask = TfTask()
