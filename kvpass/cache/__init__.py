"""Hold the slots of one layer and run steps on them, as plain torch: no graph and no model."""
