"""compare_configured: how the layout in a run's config compares with the best ones of a plan."""

from dataclasses import replace

from stretto.base.errors import StrettoError
from stretto.config.layout import Layout
from stretto.config.run import RunConfig
from stretto.engine.build import stage_parts
from stretto.measure.profile_input import ProfileInput
from stretto.plan.one_layout import compare, predict_layout
from stretto.plan.profile import Profile
from stretto.plan.search import Plan
from stretto.train.build import check_layout, fit_to_ranks


def compare_configured(plan: Plan, config: RunConfig, profile_input: ProfileInput, profile: Profile) -> Plan:
    """Return the plan with the prediction for the layout that a config sets, or with why there is none.

    If the config sets no layout, the best one on one device takes its place.
    """
    if config.layout.auto:
        return plan
    if config.layout == Layout():
        return replace(plan, configured=plan.single_device) if plan.fits_single_device else plan
    try:
        layout = _configured_layout(config, profile_input, plan.cluster.devices)
        return compare(plan, predict_layout(profile, profile_input.workload, plan.cluster, layout))
    except StrettoError as error:
        return replace(plan, configured_problem=str(error))


def _configured_layout(config: RunConfig, profile_input: ProfileInput, num_devices: int) -> Layout:
    """Return the layout in which a run of a config would train on these devices."""
    if config.layout.num_ranks > num_devices:
        config = fit_to_ranks(config, num_devices)  # if it is elastic
    model = profile_input.model
    check_layout(config.layout, model, profile_input.loss, profile_input.windows, config.data)
    layout = config.layout.effective(is_causal=model.causal)
    parts = stage_parts(model, layout)
    return layout.model_copy(update={"blocks": tuple(part.stop - part.start for part in parts)})
