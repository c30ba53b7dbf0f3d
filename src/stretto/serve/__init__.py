"""Using a trained model: predict, generate, forecast, stream."""
