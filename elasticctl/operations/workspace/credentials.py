"""Searches a workspace for credentials, so that none leaves this machine with the code.

The table is our own, because maintained libraries bring an HTTP client, query a service, or know few of the tokens that
training uses. It finds forgotten credentials, not hidden ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from elasticctl.api.errors import UsageError
from elasticctl.api.text import join_and, quote
from elasticctl.operations.observer import Observer
from elasticctl.operations.workspace.ignore_rules import OWN_RULES

NAMES: tuple[tuple[str, str], ...] = (
    ("a private key", "id_rsa id_dsa id_ecdsa id_ecdsa_sk id_ed25519 id_ed25519_sk *.key *.ppk .ssh/* .gnupg/*"),
    ("a key store", "*.p12 *.pfx *.jks *.keystore *.keytab secring.* *.kdbx *.keychain *.keychain-db"),
    ("an environment file", ".env .env.* *.env .envrc *.env.local *.env.dev *.env.prod *.env.production *.env.staging"),
    (
        "credentials of a cloud",
        ".aws/credentials .aws/config .boto .s3cfg .passwd-s3fs rclone.conf *credentials.csv *accesskeys.csv"
        " rootkey.csv application_default_credentials.json credentials.json *credentials.db access_tokens.db"
        " client_secret*.json *service-account*.json *service_account*.json *serviceaccount*.json gcp-key*.json"
        " gcp_key*.json .azure/* *.publishsettings azureprofile.json msal_token_cache.* .oci/config",
    ),
    (
        "credentials of a cluster",
        "kubeconfig kubeconfig.* *.kubeconfig *-kubeconfig *kubeconfig.yaml *kubeconfig.yml .kube/*",
    ),
    ("credentials of git", ".git-credentials .gitcookies .config/gh/hosts.yml .config/glab-cli/config.yml"),
    (
        "passwords of hosts",
        ".netrc _netrc *.netrc .authinfo .htpasswd .pgpass pgpass.conf .my.cnf .mylogin.cnf *.ovpn *.rdp",
    ),
    (
        "credentials of a registry",
        ".pypirc .m2/settings.xml .dockercfg .docker/config.json .cargo/credentials* .gem/credentials",
    ),
    ("the state of an infrastructure", "*.tfstate *.tfstate.* *.tfvars *.tfvars.json .terraformrc .pulumi/*"),
    ("a token", "kaggle.json huggingface/token .huggingface/token .vault-token *vault_pass* .comet.config .token"),
    ("secrets", "secrets.yaml secrets.yml secrets.json secrets.toml secrets.ini secrets.env .secrets .secrets.*"),
    ("a wallet", "wallet.dat *.wallet wallet.json wallets/* utc--*--*"),
    ("the history of a shell", ".bash_history .zsh_history .sh_history .psql_history .mysql_history .python_history"),
    ("cookies", "cookies.txt cookies.sqlite logins.json key4.db"),
)
"""What it is -> how such files are called, in small letters; one with a `/` is compared with the end of the path."""
_SAMPLES = (".example", ".sample", ".template", ".tmpl", ".dist", ".pub", ".md", ".py")
"""Ends of files that only show what such a file looks like, and of public keys."""

_COPY = re.compile(
    r"^#?(?:copy of )?([^/]+?)"
    r"(?:#|~|[._-](?:bak|backup|old|orig|save|saved|copy|swp|swo|rej|tmp|\d{1,3})| copy(?: \d+)?| \(\d+\))*"
    r"((?:\.[a-z0-9]{1,5})?)$",
    re.ASCII,
)
"""What editors, file managers and people make of the name of a file when they keep a copy of it."""


def by_name(path: str) -> str:
    """The kind of file at this path of a workspace, if its name suggests credentials; "" if not."""
    folded = f"/{path.lower()}"
    folder, _, name = folded.rpartition("/")
    name = _COPY.sub(r"\1\2", name)
    folded = f"{folder}/{name}"
    if name.endswith(_SAMPLES):
        return ""
    for what, patterns in NAMES:
        for pattern in patterns.split():
            if fnmatchcase(folded, f"*/{pattern}") if "/" in pattern else fnmatchcase(name, pattern):
                return what
    return ""


@dataclass(frozen=True, slots=True)
class TokenPattern:
    """The shape of a credential: `pattern` matches from `hint` on, a fixed text that is found quickly.

    `folded`: the hint is in lower case and matches any case. `before` has to match up to the beginning of the hint. The
    group `value` of the pattern, or all of it, has to look random.
    """

    what: str
    hint: bytes
    pattern: re.Pattern[bytes]
    before: re.Pattern[bytes] | None = None
    folded: bool = False


def _shape(what: str, hint: str, rest: str, before: str = "", folded: bool = False) -> TokenPattern:
    flags = re.IGNORECASE if folded else 0
    pattern = re.compile((re.escape(hint) + rest).encode(), flags)
    return TokenPattern(
        what, hint.encode(), pattern, re.compile(f"(?:{before})$".encode(), flags) if before else None, folded
    )


def _token(what: str, hint: str, rest: str) -> TokenPattern:
    """A word that begins with `hint` and continues with the expression `rest`."""
    pattern = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(hint)}{rest}".encode())
    return TokenPattern(what, hint.encode(), pattern)


_WORD, _END = "[A-Za-z0-9_-]", "(?![A-Za-z0-9_-])"
_ASSIGNED = r"[\"']?\s{0,4}[:=]\s{0,4}[\"']?"
_KEY_VALUE = r"(?P<value>(?=[a-z_-]*\d)(?=[\d_-]*[a-z])[a-z0-9_-]{32,200})(?![\w./(\[-])"
_OWNERS = (
    "(?:api|auth|access|account|secret|client|private|signing|encryption|wandb|comet|neptune|kaggle|openai|hf)[_-]?"
    "(?:api[_-]?|access[_-]?|auth[_-]?)?"
)
SHAPES: tuple[TokenPattern, ...] = (
    _shape(
        "a private key",
        "PRIVATE KEY",
        r"(?: BLOCK)? ?-{4,5}(?s:.{0,400}?)[A-Za-z0-9+/]{40}",
        before="-{4,5} ?BEGIN (?:[A-Z0-9]+ ){0,4}",
    ),
    _shape("a private key", "PrivateKey", r"\s*=\s*(?P<value>[A-Za-z0-9+/]{43}=)"),
    _shape("a private key", "PuTTY-User-Key-File-", r"\d: \S+"),
    _token("a private key", "AGE-SECRET-KEY-1", "[0-9A-Z]{50,}"),
    *(_token("an access key of AWS", start, f"[A-Z2-7]{{16}}{_END}") for start in ("AKIA", "ASIA")),
    _shape(
        "a secret key of AWS",
        "aws",
        rf"_?secret_?(?:access_?)?key(?:{_ASSIGNED}|[\"']?,\s?[\"'])(?P<value>[a-z0-9/+]{{40}})(?![a-z0-9/+=])",
        folded=True,
    ),
    _token("an API key of Google", "AIza", f"[A-Za-z0-9_-]{{35}}{_END}"),
    _token("a token of Google", "ya29.", "[A-Za-z0-9_-]{20,}"),
    _token("a token of Google", "1//0", f"{_WORD}{{40,}}"),
    _token("a client secret of Google", "GOCSPX-", f"{_WORD}{{20,}}"),
    _shape("a key of Azure storage", "AccountKey=", "(?P<value>[A-Za-z0-9+/=]{40,})"),
    _shape("a signed URL of Azure", "sv=20", r"[^\s\"']{5,400}?sig=(?P<value>[A-Za-z0-9%/+]{30,})"),
    _token("a token of GitHub", "gh", "[pousr]_[A-Za-z0-9]{30,}"),
    _token("a token of GitHub", "github_pat_", "[A-Za-z0-9_]{30,}"),
    _token("a token of GitLab", "gl", f"(?:pat|dt|rt|ptt|cbt|soat)-{_WORD}{{20,}}"),
    _token("a token of Hugging Face", "hf_", f"[A-Za-z0-9]{{30,}}{_END}"),
    _token("a token of Hugging Face", "api_org_", f"[A-Za-z0-9]{{30,}}{_END}"),
    _token("a key of an AI service", "sk-", f"(?:[a-z0-9]+-){{0,3}}{_WORD}{{20,}}"),
    _token("a key of an AI service", "gsk_", "[A-Za-z0-9]{40,}"),
    _token("a key of an AI service", "r8_", "[A-Za-z0-9]{35,}"),
    _token("a key of an AI service", "nvapi-", f"{_WORD}{{40,}}"),
    _token("a key of an AI service", "xai-", "[A-Za-z0-9]{40,}"),
    _token("a key of an AI service", "rpa_", "[A-Z0-9]{35,}"),
    _token("a key of Weights & Biases", "wandb_v1_", f"{_WORD}{{30,}}"),
    _token("a token of Slack", "xox", "[abeoprs]-[A-Za-z0-9-]{20,}"),
    _token("a token of Slack", "xapp-", "[0-9]-[A-Za-z0-9-]{20,}"),
    _shape("a webhook of Slack", "hooks.slack.com/", "(?:services|workflows|triggers)/[A-Za-z0-9/]{30,}"),
    _shape("a webhook of Discord", "/api/webhooks/", r"\d+/[\w-]{30,}"),
    _shape("a token of Telegram", ":AA", r"[\w-]{32,33}(?![\w-])", before=r"(?<!\d)\d{8,10}"),
    _token("a key of Stripe", "sk_live_", "[A-Za-z0-9]{20,}"),
    _token("a key of Stripe", "rk_live_", "[A-Za-z0-9]{20,}"),
    _token("a key of SendGrid", "SG.", r"[\w-]{16,32}\.[\w-]{30,}"),
    _token("a token of npm", "npm_", f"[A-Za-z0-9]{{36}}{_END}"),
    _shape("a token of npm", ":_", r"(?:authToken|auth|password)\s*=\s*\"?(?P<value>[\w+/-]{16,}={0,2})"),
    _token("a token of PyPI", "pypi-AgE", f"{_WORD}{{40,}}"),
    _token("a token of Docker", "dckr_", f"[po]at_{_WORD}{{20,}}"),
    _token("a token of DigitalOcean", "do", "[opr]_v1_[a-f0-9]{64}"),
    _token("a token of Databricks", "dapi", f"[a-f0-9]{{32}}(?:-\\d)?{_END}"),
    _token("a token of Vault", "hvs.", f"{_WORD}{{24,}}"),
    _shape("a token of Terraform", ".atlasv1.", r"[\w-]{60,}"),
    _token("a token of Grafana", "gl", "(?:sa|c)_[A-Za-z0-9_]{32,}"),
    _token("a token of Shopify", "shp", "(?:at|ca|pa|ss)_[a-fA-F0-9]{32}"),
    _token("a token of Linear", "lin_api_", "[A-Za-z0-9]{40}"),
    _token("a token of Notion", "ntn_", "[A-Za-z0-9]{40,}"),
    _token("a token of Atlassian", "ATATT3x", f"{_WORD}{{50,}}"),
    _shape("a JSON web token", "eyJ", r"[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{16,}"),
    _shape("a client key of a cluster", "client-key-data", r"\"?:\s*\"?(?P<value>[A-Za-z0-9+/=]{60,})"),
    _shape(
        "a token of a cluster", "user:", r"\s{1,20}(?:[\w-]+:[^\n]*\n\s{1,20}){0,4}token:\s*\"?(?P<value>[\w.-]{16,})"
    ),
    _shape(
        "a token in a header",
        "authorization",
        r"[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token)[ ](?P<value>(?=[\w+/.-]*\d)\w[\w.+/=-]{19,})",
        folded=True,
    ),
    _shape("a login of a registry", '"auth"', r"\s*:\s*\"(?P<value>[A-Za-z0-9+/=]{16,})\""),
    _shape("a password of a host", "machine", r"\s+\S+\s+login\s+\S+\s+password\s+(?P<value>\S{6,})"),
    _shape("a password in a URL", "://", r"[\w.%+-]{0,60}:(?P<value>[^\s@/:\"'`]{8,100})@[\w.\[-]"),
    *(
        _shape("a key", noun, _ASSIGNED + _KEY_VALUE, before=_OWNERS, folded=True)
        for noun in ("key", "token", "secret")
    ),
)

_ALLOWED_IN_LINE = (b"pragma: allowlist secret", b"gitleaks:allow")
"""By which detect-secrets and gitleaks know a line that may hold what looks like a secret."""
_STAND_INS = re.compile(rb"example|placeholder|changeme|your[_-]|x{6}|\*{3}|0{8}|1234567890|[<>${}]", re.I)
_BEFORE_BYTES = 60
"""How far before its hint the expression `before` of a shape reaches."""
_DISTINCT = 8
"""Of the characters of a value; what has fewer was typed to stand for one."""


def by_content(data: bytes) -> Iterator[tuple[int, str]]:
    """Where `data` contains something like a credential, and its kind; the first of each kind."""
    folded, seen = data.lower(), set[str]()
    for shape in SHAPES:
        at = -1
        hay = folded if shape.folded else data
        while shape.what not in seen and (at := hay.find(shape.hint, at + 1)) >= 0:
            found = shape.pattern.match(data, at)
            if found is None or not _fits_before(shape, data, at) or _is_allowed(data, at):
                continue
            if _looks_random(found["value"] if "value" in shape.pattern.groupindex else found[0]):
                seen.add(shape.what)
                yield at, shape.what


def _fits_before(shape: TokenPattern, data: bytes, at: int) -> bool:
    return shape.before is None or shape.before.search(data[max(0, at - _BEFORE_BYTES) : at]) is not None


def _looks_random(value: bytes) -> bool:
    return len({*value}) >= _DISTINCT and _STAND_INS.search(value) is None


def _is_allowed(data: bytes, at: int) -> bool:
    end = data.find(b"\n", at)
    line = data[data.rfind(b"\n", 0, at) + 1 : end if end >= 0 else len(data)]
    return any(mark in line for mark in _ALLOWED_IN_LINE)


_OVERLAP_BYTES = 4096
"""More than any credential is long that is searched for."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_SHOWN, _NAMED = 20, 3


@dataclass(frozen=True, slots=True)
class SuspectedCredential:
    """A file of a workspace that seems to contain a credential; `line` counts from 1, None: its name suggests it."""

    path: str
    what: str
    line: int | None = None

    def __str__(self) -> str:
        where = quote(self.path) if self.line is None else f"{quote(self.path)}, line {self.line}"
        return f"{where}: looks like {self.what}"


class ContentScan:
    """Searches the content of one file that comes in chunks, of any size; the first of each kind counts."""

    def __init__(self, path: str) -> None:
        self._path, self._tail, self._lines_before, self._wide = path, b"", 0, False
        self._found: dict[str, SuspectedCredential] = {}
        self._started = False

    def feed(self, chunk: bytes) -> None:
        """Search the next chunk."""
        if not self._started:
            self._started, self._wide = True, chunk.startswith(_UTF16)
        if self._wide:
            # Latin letters of UTF-16, as some editors write it.
            chunk = chunk.removeprefix(_UTF16[0]).removeprefix(_UTF16[1]).replace(b"\0", b"")
        window = self._tail + chunk
        for start, what in by_content(window):
            line = self._lines_before + window.count(b"\n", 0, start) + 1
            self._found.setdefault(what, SuspectedCredential(self._path, what, line))
        cut = max(0, len(window) - _OVERLAP_BYTES)
        self._lines_before += window.count(b"\n", 0, cut)
        self._tail = window[cut:]

    @property
    def findings(self) -> tuple[SuspectedCredential, ...]:
        """The findings so far, in the order of their lines."""
        return tuple(sorted(self._found.values(), key=lambda finding: finding.line or 0))


def refuse_credentials(folder: str, findings: Sequence[SuspectedCredential], observer: Observer) -> None:
    """Report the findings, and raise UsageError if there are any."""
    if not findings:
        return
    for finding in findings[:_SHOWN]:
        observer.report(str(finding))
    if len(findings) > _SHOWN:
        observer.report(f"... and {len(findings) - _SHOWN} more like these")
    paths = list(dict.fromkeys(finding.path for finding in findings))
    more = [f"{len(paths) - _NAMED} more"] if len(paths) > _NAMED else []
    named, rule = join_and([*map(quote, paths[:_NAMED]), *more]), rule_of(paths[0])
    look = "file looks" if len(paths) == 1 else "files look"
    raise UsageError(
        f"nothing was sent: {len(paths)} {look} like credentials in {folder}: {named}. FIX: leave each out with a line"
        f" in {OWN_RULES}, such as {rule} (`elasticctl secret set` gives a job its secrets), or send it anyway"
        f" with a line that names it: !{rule}"
    )


def findings_by_name(path: str) -> tuple[SuspectedCredential, ...]:
    """The finding from the name of a file."""
    what = by_name(path)
    return (SuspectedCredential(path, what),) if what else ()


def rule_of(path: str) -> str:
    """The gitignore rule that matches this path and no other."""
    escaped = re.sub(r"([\\*?\[\]])", r"\\\1", path)
    return "/" + re.sub(r"\s(?=\s*$)", r"[\g<0>]", escaped)  # else it would be trimmed at the end
