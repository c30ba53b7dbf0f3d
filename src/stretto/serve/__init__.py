"""Use: what is done with a trained model: sessions, predictions, text, forecasts, export."""
