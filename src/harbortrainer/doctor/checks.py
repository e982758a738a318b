"""The lists of checks, cheapest first, so that mistakes in the run file are reported before slow checks begin."""

from harbortrainer.doctor import machine_checks, model_files, run_file_checks, task_checks
from harbortrainer.doctor.finding import Finding
from harbortrainer.doctor.launch_plan import LaunchPlan


def examine_file(plan: LaunchPlan) -> list[Finding]:
    """Check the run file for consistency and its files on disk."""
    checks = (
        run_file_checks.check_plugin_keys,
        machine_checks.check_tasks,
        machine_checks.check_image_builder,
        task_checks.check_requirements,
        task_checks.check_leftovers,
        task_checks.check_contamination,
        machine_checks.check_run_folder,
        model_files.check,
        model_files.check_quantization,
        run_file_checks.check_numbers,
        run_file_checks.check_same_trials,
        run_file_checks.check_echo_roles,
        run_file_checks.check_served_adapter,
    )
    return [finding for check in checks for finding in check(plan)]


def examine_machine(plan: LaunchPlan) -> list[Finding]:
    """Check this machine: programs, GPUs, ports, disk, credentials. Imports parts of Harbor."""
    from harbortrainer.doctor import (
        credentials,
        docker_daemon,
        engine_checks,
        gpus,
        machine_checks,
        pace,
        refused_tasks,
        run_file_checks,
        task_checks,
    )

    checks = (
        task_checks.check_agent_names,
        refused_tasks.check_refused,
        credentials.check_providers,
        engine_checks.check_prime_rl,
        engine_checks.check_vllm,
        model_files.check_hub,
        gpus.check,
        pace.check,
        run_file_checks.check_evaluation_size,
        credentials.check_dotenv,
        credentials.check_wandb,
        machine_checks.check_ports,
        machine_checks.check_env_servers,
        machine_checks.check_open_files,
        machine_checks.check_proxies,
        machine_checks.check_disk,
        machine_checks.check_tools,
        docker_daemon.check,
    )
    return [finding for check in checks for finding in check(plan)]


def measure_policy(plan: LaunchPlan) -> list[Finding]:
    """Load the policy into the embedded engine's sampler and measure its speed. Run it last."""
    from harbortrainer.doctor import sampling_speed

    return list(sampling_speed.check(plan))


def examine_policy(plan: LaunchPlan) -> list[Finding]:
    """Check the policy with its own libraries, which take seconds to import. Run it after the other checks."""
    from harbortrainer.doctor import policy_checks

    return [
        finding
        for check in (policy_checks.check_architecture, policy_checks.check_chat_format)
        for finding in check(plan)
    ]
