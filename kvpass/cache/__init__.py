"""One layer's slots, and what a step does to them, as plain torch: no graph and no model."""
