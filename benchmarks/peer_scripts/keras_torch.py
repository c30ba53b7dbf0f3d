"""Keras on torch: one device."""

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from case import LEARNING_RATE, read_case, serve
from keras_bias import double_lstm_biases

torch.set_num_threads(1)


class SGD(keras.optimizers.SGD):
    """Treats the biases of LSTM layers as torch does."""

    def apply(self, grads: list[Any], trainable_variables: list[Any] | None = None) -> None:
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        super().apply(double_lstm_biases(grads, variables), trainable_variables)


case, rank, size = read_case()
weights = case.weights()
inputs = keras.Input((None,) if case.vocabulary else (None, case.num_inputs))
x = keras.layers.Embedding(case.vocabulary, case.num_inputs)(inputs) if case.vocabulary else inputs
listed = [weights["embedding.weight"]] if case.vocabulary else []
for layer in range(case.layers):
    x = keras.layers.LSTM(case.hidden, return_sequences=True)(x)
    bias = weights[f"lstm.bias_ih_l{layer}"] + weights[f"lstm.bias_hh_l{layer}"]
    listed += [weights[f"lstm.weight_ih_l{layer}"].T, weights[f"lstm.weight_hh_l{layer}"].T, bias]
model = keras.Model(inputs, keras.layers.Dense(case.num_outputs)(x))
model.set_weights([*listed, weights["head.weight"].T, weights["head.bias"]])
model.compile(SGD(LEARNING_RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x, targets, _ = case.batch(0, 1)
serve(lambda: float(model.train_on_batch(x, targets)))
