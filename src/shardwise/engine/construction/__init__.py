"""How an engine is built: the recipe of its stages, the cut of the weights, and the handlers of the Plan."""
