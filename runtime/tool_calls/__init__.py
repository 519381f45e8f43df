"""Tool calls: functions that a model may call, the grammar of such calls, and the calls in its text."""
