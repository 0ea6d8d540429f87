"""One deployable DAG per file; each reads like the sentence that describes it."""
