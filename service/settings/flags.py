"""Adds the flags of settings to a parser. Every start imports this, so it imports little."""

from argparse import Action, ArgumentParser, Namespace, _ActionsContainer
from collections.abc import Sequence

from inferpool.service.settings.names import FLAG_GROUPS, FLAGS


class SettingFlag(Action):
    """Flag of a setting; its help is the docstring of the setting.

    The help is read from the source once it is asked for: that takes as long as all other flags.
    """

    @property
    def help(self) -> str:
        """Its help."""
        from inferpool.service.settings.fields import setting_texts

        return setting_texts()[self.dest].brief

    @help.setter
    def help(self, _: str | None) -> None:
        """Ignore what the constructor stores."""

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Store the value as text; of one that turns something on "true"."""
        setattr(namespace, self.dest, "true" if self.nargs == 0 else values)


def add_settings_flags(parser: ArgumentParser) -> None:
    """Add MODEL and the flags of settings. All are text; `settings.loader` checks them."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to serve; see below")
    parser.add_argument("--config", metavar="PATH", help="a TOML file of settings")
    for title, names in FLAG_GROUPS.items():
        add_setting_flags(parser.add_argument_group(title) if title else parser, [*names])


def add_setting_flags(group: _ActionsContainer, names: Sequence[str]) -> None:
    """Add the flags of some settings to a parser, or to a group of its flags."""
    metavars = {name: metavar for group in FLAG_GROUPS.values() for name, metavar in group.items()}
    for name in names:
        if metavars[name]:
            group.add_argument(FLAGS[name], action=SettingFlag, metavar=metavars[name])
        else:
            group.add_argument(FLAGS[name], action=SettingFlag, nargs=0)
