"""Models and weights in and out: ONNX, torch, Keras."""
