"""Config + recipe -> `Plan`, its invariants, and how it is shown."""

from ktc.plan.build import build_plan
from ktc.plan.ir import LinearPlan, ModulePlan, MoePlan, Plan, RuleUse
from ktc.plan.render import render
from ktc.plan.verify import PlanError, verify

__all__ = ["LinearPlan", "ModulePlan", "MoePlan", "Plan", "PlanError", "RuleUse", "build_plan", "render", "verify"]
