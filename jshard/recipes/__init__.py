"""What the planner and the trainer share: model files, recipes, and the state and step made of them."""
