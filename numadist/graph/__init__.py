"""A model as a graph: captured, put into one form, asked questions."""
