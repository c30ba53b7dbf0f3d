from stretto.measure.profile import measure_profile as measure_profile
from stretto.measure.workload import find_workload as find_workload
from stretto.plan.advice import advise as advise
from stretto.plan.cluster import Cluster as Cluster
from stretto.plan.one_layout import balance as balance
from stretto.plan.one_layout import predict_layout as predict_layout
from stretto.plan.profile import Link as Link
from stretto.plan.profile import Profile as Profile
from stretto.plan.profile import load_profile as load_profile
from stretto.plan.profile import save_profile as save_profile
from stretto.plan.search import Plan as Plan
from stretto.plan.search import find_plan as find_plan
from stretto.plan.trace import Trace as Trace

__all__: list[str]
