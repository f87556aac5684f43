"""Fault kinds: the faults of a campaign, each with the tests of a landing that bring it about one by one.

A campaign strikes with all of them, in an order of its seed's; `tests.machine.laws` sees to it that a landing runs what
is named here.
"""

from collections.abc import Mapping

_MATRIX = "tests/chaos/test_kill_matrix.py::test_every_job_ends_as_if_nobody_had_killed_anything"
_NAMED = "tests/chaos/test_named_faults.py"
_WAKEUPS = "tests/chaos/test_lost_wakeups.py"
_SILENCE = "tests/worker/supervision/test_silent_connection.py"
_LAUNCHER = "tests/worker/execution/ranks/test_launcher.py"
_BROKER = "tests/worker/test_broker_faults.py"

BROUGHT_ABOUT_BY: Mapping[str, tuple[str, ...]] = {
    "kill worker": (f"{_MATRIX}[worker-mid_layer]",),
    "kill child": (f"{_MATRIX}[child-mid_collection]",),
    "kill guardian": ("tests/worker/process/test_child_process.py::test_a_killed_guardian_takes_the_group_with_it",),
    "kill rank": (
        f"{_LAUNCHER}::test_a_killed_rank_is_named_within_seconds_though_the_other_listens_to_nobody",
        "tests/engine/collection/test_killed_attempts.py::test_one_rank_is_killed_anywhere",
    ),
    "kill two workers": (
        "tests/chaos/test_divided_jobs.py::test_two_workers_killed_in_one_moment_cost_their_pieces_an_attempt",
    ),
    "kill api": (f"{_MATRIX}[api-cancelling]",),
    "stop beyond the lease": (f"{_NAMED}::test_two_zombies_write_nothing",),
    "pause": (
        "tests/worker/agent/test_worker_locks.py::test_a_frozen_worker_is_not_dead_nor_one_with_a_frozen_guardian",
        f"{_NAMED}::test_a_busy_worker_hands_its_job_back_and_another_goes_on_from_the_checkpoint",
    ),
    "sigterm": (f"{_NAMED}::test_a_busy_worker_hands_its_job_back_and_another_goes_on_from_the_checkpoint",),
    "flushall": (f"{_WAKEUPS}::test_flushall_with_many_queued_loses_none",),
    "kill redis": (f"{_MATRIX}[redis-before_claim]",),
    "restart postgres": (f"{_MATRIX}[postgres-write_to_settle]",),
    "terminate backends": (
        "tests/jobs/schema/test_database.py::test_connections_killed_by_the_server_cost_at_most_one_call",
        "tests/worker/supervision/test_silent_database.py::test_connections_that_the_server_ends_cost_no_attempt",
    ),
    "double wake-ups": (f"{_WAKEUPS}::test_a_wakeup_delivered_many_times_is_one_job",),
    "lose replies": (
        "tests/api/background/test_database_loss.py::test_a_submission_whose_commit_nobody_confirmed_is_repeated_safely",
    ),
    "silent database": (f"{_SILENCE}::test_the_child_ends_within_the_lease_while_the_heartbeat_waits_in_its_query",),
    "redis a replica": (f"{_BROKER}::test_a_replica_and_a_full_server_carry_wakeups",),
    "redis full": (f"{_BROKER}::test_a_replica_and_a_full_server_carry_wakeups",),
    "malformed messages": (f"{_BROKER}::test_what_is_no_message_ends_no_worker",),
}
