"""Which rule decides a module, and whether every rule decided one: the first match wins.

What a rule then makes of the module is build.py's.
"""

from __future__ import annotations

from dataclasses import replace

from ktc.errors import RecipeError
from ktc.models.family import Family
from ktc.plan.ir import RuleUse
from ktc.recipe.model import Recipe, Rule

PROTECTED_ROLES = ("protected_linear", "router")
CALLBACK_ROLES = ("attention", "mla", "dense_mlp", "shared_expert")
_SIMILAR = ("attention", "mla")
"""Roles of which a family has one: what is written for the other is meant for it."""
_WANTED_ROLE = {"moe": "moe", "mla": "mla", "embedding": "embedding"}


class RuleMatcher:
    """Matches modules one by one and keeps count.

    Attributes:
        decided, protected, shadowed: per rule, the modules that it decided, that it matched but had to
            leave alone, and the earlier rules that had decided what it matches.
    """

    def __init__(self, family: Family, recipe: Recipe) -> None:
        self.family, self.recipe = family, recipe
        self.decided: dict[int, list[str]] = {rule.index: [] for rule in recipe.rules}
        self.protected: dict[int, list[str]] = {rule.index: [] for rule in recipe.rules}
        self.shadowed: dict[int, set[int]] = {rule.index: set() for rule in recipe.rules}
        self._seen: list[tuple[str, str, str]] = []  # name, class, role

    def match(self, name: str, hf_class: str, role: str) -> tuple[Rule | None, str]:
        """The rule that decides this module, or None and why a rule that matched must not.

        Args:
            name: in the module tree, "" for the model; hf_class: dotted; role: of ktc.models.roles.
        Raises:
            RecipeError: the rule puts an operator or an option where it cannot be.
        """
        self._seen.append((name, hf_class, role))
        matching = [rule for rule in self.recipe.rules if rule.match(name, hf_class, role)]
        if not matching:
            return None, ""
        first = matching[0]
        for later in matching[1:]:
            self.shadowed[later.index].add(first.index)
        if first.operator == "linear" and role in PROTECTED_ROLES:
            self.protected[first.index].append(name)
            return None, f"protected: kept as it is although {self.recipe.where(first)} matches it"
        self._check_kind(first, name, hf_class, role)
        self.decided[first.index].append(name)
        return first, ""

    def _check_kind(self, rule: Rule, name: str, hf_class: str, role: str) -> None:
        """A rule may only put an operator where it computes the same thing."""
        where, short = self.recipe.where(rule), hf_class.rpartition(".")[2]
        if rule.operator == "linear" and role not in ("linear", "lm_head"):
            raise RecipeError(
                f"{where}: ktc.Linear replaces torch.nn.Linear, but the rule also matches"
                f" {name or 'the model'} ({short})",
                "add class: torch.nn.Linear to the rule's match",
            )
        if rule.callback and role not in CALLBACK_ROLES:
            raise RecipeError(
                f"{where}: callback: true also matches {name or 'the model'} ({short}, role {role})",
                f"the decode graph can call modules of role {', '.join(CALLBACK_ROLES)}: add the role to match",
            )
        if rule.kv_cache and role not in ("attention", "mla"):
            raise RecipeError(
                f"{where}: kv_cache: {rule.kv_cache} also matches {name or 'the model'} ({short}, role {role})",
                "only attention has a KV cache: add role: attention, or role: mla, to match",
            )
        wanted = _WANTED_ROLE.get(rule.operator)
        if wanted is not None and role != wanted:
            hint = f"match role: {wanted} instead"
            if rule.operator == "mla" and not self.family.mla:
                hint = f"{self.family.model_type} has no latent attention: match role: mla with optional: true"
            raise RecipeError(
                f"{where}: {rule.replace_class} cannot replace {name or 'the model'} ({short}, role {role})", hint
            )

    def check_rules(self) -> None:
        """Every rule must have decided something (failure C7: a rule that silently does nothing).

        Raises:
            RecipeError: one did not, and is not optional.
        """
        for rule in self.recipe.rules:
            where = self.recipe.where(rule)
            if self.decided[rule.index]:
                continue
            if self.protected[rule.index]:
                names = self.protected[rule.index]
                raise RecipeError(
                    f"{where}: matches only protected modules, such as {names[0]} ({len(names)} in all)",
                    "ktc.Linear must leave them alone: their weights are read by another operator; remove the rule",
                )
            if rule.optional:
                continue
            if earlier := self.shadowed[rule.index]:
                first = self.recipe.where(self.recipe.rules[min(earlier)])
                raise RecipeError(
                    f"{where}: decides no module: {first} already took everything that it matches",
                    "the first match wins: move the rule up, or remove it",
                )
            raise RecipeError(
                f"{where}: matches no module of this {self.family.model_type} model: {rule.match}",
                f"{self._nearest(rule)}mark the rule optional: true if that is expected",
            )

    def _nearest(self, rule: Rule) -> str:
        """What the rule would match with another role, or what the class of its role is called here."""
        if rule.match.role is not None:
            other = replace(rule.match, role=None)
            roles = {
                role: name for name, hf_class, role in self._seen if role in _SIMILAR and other(name, hf_class, role)
            }
            if rule.match.role in _SIMILAR and roles:
                role, name = next(iter(roles.items()))
                return f"{name} is of role {role} here; otherwise "
        if rule.operator == "moe" and rule.match.cls is not None:
            return f"the MoE block of this family is {self.family.moe_class}; "
        return ""

    def rule_use(self, rule: Rule) -> RuleUse:
        """What `ktc plan` says of a rule after the walk."""
        return RuleUse(
            where=self.recipe.where(rule),
            match=str(rule.match),
            replace=rule.replace_class,
            modules=len(self.decided[rule.index]),
            protected=len(self.protected[rule.index]),
        )
