"""From a configuration to units of cells: items, inputs, patches, ids, checks, costs."""
