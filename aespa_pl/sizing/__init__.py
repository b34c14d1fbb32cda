"""Choose widths or block types so that a model has a given size."""
