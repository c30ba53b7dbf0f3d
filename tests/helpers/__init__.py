"""What tests share, each module named after what it gives."""
