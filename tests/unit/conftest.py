"""Property tests have no time limit: how long one example takes says how busy the machine is."""

import hypothesis

hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")
