"""A language model with Keras on the workers of TF_CONFIG. Needs tensorflow.

export TF_CONFIG='{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
python tf_before.py
"""

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # reads TF_CONFIG

book = np.frombuffer(Path("book.txt").read_bytes(), np.uint8).astype(np.int32)
inputs, targets = (text.reshape(16, -1) for text in (book[:-1], book[1:]))
# Batch n holds step 64 n to 64 n + 63 of all sixteen streams, so that state could be carried from batch to batch.
batches = [(inputs[:, start : start + 64], targets[:, start : start + 64]) for start in range(0, inputs.shape[1], 64)]
dataset = tf.data.Dataset.from_tensor_slices(tuple(map(np.concatenate, zip(*batches, strict=True))))
options = tf.data.Options()
# By default each worker would take other files, or every second row: then a row of a batch is no longer one stream.
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
dataset = dataset.batch(16, drop_remainder=True).with_options(options)

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((64,), batch_size=16 // strategy.num_replicas_in_sync),
            tf.keras.layers.Embedding(256, 64),
            tf.keras.layers.LSTM(64, return_sequences=True, stateful="stateful" in sys.argv),
            tf.keras.layers.Dense(256),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(3e-3, global_clipnorm=1.0), loss)
model.fit(dataset, epochs=1, shuffle=False, verbose=2)
