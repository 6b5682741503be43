"""The engine's hold on the user's model: its calls, its parameters as they look between steps, and what is restored."""
