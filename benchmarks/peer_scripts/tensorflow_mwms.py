"""TensorFlow: one device, or MultiWorkerMirroredStrategy."""

import json
import os

from case import LEARNING_RATE, Case, read_case, serve
from keras_bias import double_lstm_biases

case, rank, size = read_case()
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
if size > 1:
    workers = [f"127.0.0.1:{int(os.environ['MASTER_PORT']) + index}" for index in range(size)]
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})

import tensorflow as tf  # noqa: E402

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(size)  # a second thread for collectives, as gloo has one


def make_model(case: Case) -> tf.keras.Model:
    """The model, with the weights of torch's names in Keras's order."""
    inputs = tf.keras.Input((None,) if case.vocabulary else (None, case.num_inputs))
    x = tf.keras.layers.Embedding(case.vocabulary, case.num_inputs)(inputs) if case.vocabulary else inputs
    for _ in range(case.layers):
        lstm = tf.keras.layers.LSTM(case.hidden, return_sequences=True)
        x = (tf.keras.layers.Bidirectional(lstm) if case.is_bidirectional else lstm)(x)
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(case.num_outputs)(x))
    model.set_weights(keras_weights(case))
    return model


def keras_weights(case: Case) -> list[object]:
    weights = case.weights()
    listed: list[object] = [weights["embedding.weight"]] if case.vocabulary else []
    for layer in range(case.layers):
        for direction in ("", "_reverse") if case.is_bidirectional else ("",):
            part = {name: weights[f"lstm.{name}_l{layer}{direction}"] for name in ("weight_ih", "weight_hh")}
            bias = sum(weights[f"lstm.{name}_l{layer}{direction}"] for name in ("bias_ih", "bias_hh"))
            listed += [part["weight_ih"].T, part["weight_hh"].T, bias]
    return [*listed, weights["head.weight"].T, weights["head.bias"]]


strategy = tf.distribute.MultiWorkerMirroredStrategy() if size > 1 else tf.distribute.get_strategy()
x, targets, _ = case.batch(rank, size)
weights = (targets >= 0).astype("float32")  # padding has no loss
with strategy.scope():
    model = make_model(case)
    sgd = tf.keras.optimizers.SGD(LEARNING_RATE)
tensors = [tf.constant(array) for array in (x, targets.clip(0), weights)]


def replica_step(x: tf.Tensor, targets: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, model(x, training=True))
        loss = tf.reduce_sum(losses * weights) / case.num_targets
    variables = model.trainable_variables
    gradients = double_lstm_biases(tape.gradient(loss, variables), variables)
    sgd.apply_gradients(zip(gradients, variables, strict=True))  # summed over replicas
    return loss


@tf.function
def global_step() -> tf.Tensor:
    return strategy.run(replica_step, args=tuple(tensors))


serve(lambda: float(global_step().numpy()))
