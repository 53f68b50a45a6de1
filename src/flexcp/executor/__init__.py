"""The executor runs any plan on real ranks. All decisions are made in the plan; none are made here."""
