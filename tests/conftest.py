"""Property tests draw the same examples in every run of the gate, and none fails because the machine is busy."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "gate",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.load_profile("gate")
