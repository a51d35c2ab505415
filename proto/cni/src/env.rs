//! The runtime's environment variables: which command, for which container and interface.

use std::{ffi::OsString, fmt, path::PathBuf};

use serde::Deserialize;

use crate::{
    Code, Error,
    text::{list, one_of},
};

words! {
    /// What the runtime asks for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Command {
        /// Attach a container, or adjust its attachment.
        Add = "ADD",
        /// Undo ADD.
        Del = "DEL",
        /// Compare an attachment with what ADD answered.
        Check = "CHECK",
        /// Say whether ADD can be served.
        Status = "STATUS",
        /// Remove everything but the attachments named.
        Gc = "GC",
        /// List the supported versions.
        Version = "VERSION",
    }
}

impl Command {
    /// Reads `CNI_COMMAND`.
    ///
    /// # Errors
    /// Code 4.
    pub fn parse(text: &str) -> Result<Self, Error> {
        Command::from_word(text).ok_or_else(|| {
            let msg = format!("CNI_COMMAND {text:?} is not a command of the CNI specification");
            wrong(msg, format!("expected {}", one_of(Command::ALL)))
        })
    }
}

fn wrong(msg: impl fmt::Display, remedy: impl fmt::Display) -> Error {
    Error::advise(Code::InvalidEnvironment, msg, remedy)
}

/// A container's identity as the runtime gives it: alphanumeric, then also `_`, `.`, `-`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct ContainerId(String);

impl TryFrom<String> for ContainerId {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        match is_identifier(&text) {
            true => Ok(ContainerId(text)),
            false => Err(wrong(
                format!("{text:?} is not a container ID"),
                IDENTIFIER_RULE,
            )),
        }
    }
}

impl ContainerId {
    /// Checks the specification's rule.
    ///
    /// # Errors
    /// Code 4.
    pub fn parse(text: &str) -> Result<Self, Error> {
        text.to_owned().try_into()
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The rule of [`is_identifier`] in words.
pub(crate) const IDENTIFIER_RULE: &str =
    "it starts with a letter or digit and has letters, digits, '_', '.', '-'";

/// The rule shared by container IDs and network names.
pub(crate) fn is_identifier(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphanumeric())
        && bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

/// A network interface's name that the kernel takes as it is: `dev_valid_name()` in
/// net/core/dev.c, and no `%`, which the kernel would expand.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct IfName(String);

impl TryFrom<String> for IfName {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, &'static str> {
        let is_wrong = |c: char| c.is_whitespace() || matches!(c, '/' | ':' | '%' | '\0');
        match text.as_str() {
            "" | "." | ".." => Err("it is empty, '.' or '..'"),
            _ if text.len() > 15 => Err("an interface name has 1 to 15 bytes"),
            _ if text.contains(is_wrong) => Err("it has '/', ':', '%' or white space"),
            _ => Ok(IfName(text)),
        }
    }
}

impl IfName {
    /// Checks the kernel's rule.
    ///
    /// # Errors
    /// The reason, without the name.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        text.to_owned().try_into()
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

macro_rules! display {
    ($($name:ident)+) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )+};
}

display!(ContainerId IfName Args);

/// The specification's identity of an attachment within a network.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
pub struct AttachmentId {
    /// The container.
    #[serde(rename = "containerID")]
    pub container_id: ContainerId,
    /// Its interface.
    pub ifname: IfName,
}

impl fmt::Display for AttachmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of container {}", self.ifname, self.container_id)
    }
}

/// The keys of `CNI_ARGS` that these plugins read, or that a Kubernetes runtime sets for all.
pub const KNOWN_ARGS: [&str; 6] = [
    "K8S_POD_NAMESPACE",
    "K8S_POD_NAME",
    "K8S_POD_INFRA_CONTAINER_ID",
    "K8S_POD_UID",
    "IP",
    "MAC",
];

/// `CNI_ARGS`: pairs of key and value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Args(String);

impl Args {
    /// Reads `K=V;K2=V2`; keys are case-sensitive here, unlike in JSON.
    ///
    /// # Errors
    /// Code 4 naming the text that is not a pair.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let is_pair = |pair: &str| match pair.split_once('=') {
            Some((key, value)) => !key.is_empty() && !value.contains('='),
            None => pair.is_empty(),
        };
        match text.split(';').find(|pair| !is_pair(pair)) {
            None => Ok(Args(text.to_owned())),
            Some(pair) => Err(wrong(
                format!("CNI_ARGS: {pair:?} is not a pair KEY=VALUE"),
                "separate pairs with ';'",
            )),
        }
    }

    fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        let pairs = self.0.split(';');
        pairs.filter_map(|pair| pair.split_once('='))
    }

    /// The value of a key; an empty one counts as absent, the last of several wins.
    pub fn get(&self, key: &str) -> Option<&str> {
        let values = self.pairs().filter(|(known, _)| *known == key);
        values.last().map(|(_, v)| v).filter(|v| !v.is_empty())
    }

    /// Refuses keys that are not known, unless `IgnoreUnknown` says not to.
    ///
    /// # Errors
    /// Code 4 naming the keys.
    pub fn allow_only(&self, known: &[&str]) -> Result<(), Error> {
        let keys = self.pairs().map(|(key, _)| key);
        let unknown = keys.filter(|key| *key != "IgnoreUnknown" && !known.contains(key));
        let unknown = list(unknown);
        if unknown.is_empty() || is_true(self.get("IgnoreUnknown")) {
            return Ok(());
        }
        Err(wrong(
            format!("CNI_ARGS: unknown keys {unknown}, without IgnoreUnknown=1"),
            format!("known keys: {}", list(known)),
        ))
    }
}

/// As Go reads it, without regard to case.
fn is_true(value: Option<&str>) -> bool {
    value.is_some_and(|value| value == "1" || value.eq_ignore_ascii_case("true"))
}

/// What the environment says, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// The command; VERSION is answered before an `Environment` is made.
    pub command: Command,
    /// Container and interface; there for ADD, DEL and CHECK, absent for STATUS and GC.
    pub attachment: Option<AttachmentId>,
    /// The namespace's path as given; there for ADD and CHECK, and for DEL unless the
    /// runtime has none any more (an empty text counts as none).
    pub netns: Option<String>,
    /// The pairs of `CNI_ARGS`.
    pub args: Args,
    /// The directories that are searched for other plugins, in order.
    pub path: Vec<PathBuf>,
    /// `CNI_NETNS_OVERRIDE`: the plugin's own namespace may be the container's.
    pub netns_override: bool,
}

impl Environment {
    /// The variables that say the same to another plugin, but for the command.
    pub fn variables(&self) -> Vec<(&'static str, OsString)> {
        let id = self.attachment.as_ref();
        let (container, ifname) = id
            .map(|id| (id.container_id.as_str(), id.ifname.as_str()))
            .unwrap_or_default();
        // Only a directory's name with a colon in it cannot be joined; none was split off.
        let path = std::env::join_paths(&self.path).unwrap_or_default();
        vec![
            ("CNI_CONTAINERID", container.into()),
            ("CNI_IFNAME", ifname.into()),
            ("CNI_NETNS", self.netns.clone().unwrap_or_default().into()),
            ("CNI_ARGS", self.args.to_string().into()),
            ("CNI_PATH", path),
        ]
    }

    /// Reads what `command` needs through `get`, which is `std::env::var_os` but for tests.
    ///
    /// # Errors
    /// Code 4: one error that names every variable that is missing, or the first that is
    /// wrong.
    pub fn read(
        command: Command,
        get: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Environment, Error> {
        let text = |name: &str| -> Result<Option<String>, Error> {
            let Some(value) = get(name).filter(|value| !value.is_empty()) else {
                return Ok(None);
            };
            let text = value.into_string().map(Some);
            text.map_err(|value| wrong(format!("{name} is not UTF-8: {}", value.display()), ""))
        };
        let container_id = text("CNI_CONTAINERID")?;
        let netns = text("CNI_NETNS")?;
        let ifname = text("CNI_IFNAME")?;
        let path = get("CNI_PATH").filter(|path| !path.is_empty());

        let per_attachment = matches!(command, Command::Add | Command::Del | Command::Check);
        let netns_needed = per_attachment && command != Command::Del;
        let needed = [
            ("CNI_CONTAINERID", per_attachment && container_id.is_none()),
            ("CNI_NETNS", netns_needed && netns.is_none()),
            ("CNI_IFNAME", per_attachment && ifname.is_none()),
            ("CNI_PATH", path.is_none()),
        ];
        let missing = needed.iter().filter(|(_, missing)| *missing);
        let missing = list(missing.map(|(name, _)| name));
        if !missing.is_empty() {
            let msg = format!("required environment variables missing: {missing}");
            return Err(wrong(msg, format!("{command} needs them")));
        }

        let attachment = match (container_id, ifname) {
            (Some(container_id), Some(ifname)) if per_attachment => Some(AttachmentId {
                container_id: ContainerId::try_from(container_id)
                    .map_err(|e| e.context("CNI_CONTAINERID"))?,
                ifname: IfName::parse(&ifname)
                    .map_err(|reason| wrong(format!("CNI_IFNAME {ifname:?}: {reason}"), ""))?,
            }),
            _ => None,
        };
        let directories = path.iter().flat_map(std::env::split_paths);
        Ok(Environment {
            command,
            attachment,
            netns,
            args: Args::parse(&text("CNI_ARGS")?.unwrap_or_default())?,
            path: directories.filter(|path| path.is_absolute()).collect(),
            netns_override: is_true(text("CNI_NETNS_OVERRIDE")?.as_deref()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(command: Command, pairs: &[(&str, &str)]) -> Result<Environment, Error> {
        Environment::read(command, |name| {
            pairs
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| OsString::from(value))
        })
    }

    const FULL: [(&str, &str); 5] = [
        ("CNI_CONTAINERID", "pod-1"),
        ("CNI_NETNS", "/run/netns/pod-1"),
        ("CNI_IFNAME", "net1"),
        ("CNI_PATH", "/opt/cni/bin:/usr/lib/cni"),
        ("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAME=a"),
    ];

    #[test]
    fn each_command_needs_its_own_variables() {
        for missing in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"] {
            let rest: Vec<_> = FULL
                .into_iter()
                .filter(|(name, _)| *name != missing)
                .collect();
            for (command, fails) in [
                (Command::Add, true),
                (Command::Check, true),
                (Command::Del, missing != "CNI_NETNS"),
                (Command::Gc, missing == "CNI_PATH"),
                (Command::Status, missing == "CNI_PATH"),
            ] {
                assert_eq!(
                    read(command, &rest).is_err(),
                    fails,
                    "{command:?} without {missing}"
                );
            }
        }
        let env = read(Command::Gc, &FULL).unwrap();
        assert_eq!(env.attachment, None);
        let env = read(
            Command::Del,
            &[("CNI_NETNS", ""), FULL[0], FULL[2], FULL[3]],
        )
        .unwrap();
        assert_eq!(env.netns, None);
        assert_eq!(env.path.len(), 2);
    }

    #[test]
    fn names_follow_the_specification_and_the_kernel() {
        for id in ["-a", "a/b", "a b", ".", "a\u{e9}"] {
            assert!(ContainerId::parse(id).is_err(), "{id}");
        }
        for id in ["a", "0.b-c_d", "4f"] {
            assert!(ContainerId::parse(id).is_ok(), "{id}");
        }
        for name in [
            "",
            ".",
            "..",
            "a/b",
            "a:b",
            "a b",
            "a\tb",
            "1234567890123456",
            "net%d",
        ] {
            assert!(IfName::parse(name).is_err(), "{name}");
        }
        for name in ["123456789012345", "eth0.100", "net1", "a-b_c"] {
            assert!(IfName::parse(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn args_are_pairs_and_unknown_ones_need_leave() {
        for text in ["A=B=C", "A", "=B"] {
            assert_eq!(
                Args::parse(text).unwrap_err().code,
                Code::InvalidEnvironment,
                "{text}"
            );
        }
        let args = Args::parse("MAC=02:00:00:00:00:01;;IP=;X=1").unwrap();
        assert_eq!(args.get("MAC"), Some("02:00:00:00:00:01"));
        assert_eq!(args.get("IP"), None);
        assert_eq!(args.get("mac"), None);
        assert!(
            args.allow_only(&["MAC", "IP"])
                .unwrap_err()
                .msg
                .contains('X')
        );
        assert!(args.allow_only(&["MAC", "IP", "X"]).is_ok());
        let leave = |text: &str| Args::parse(text).unwrap().allow_only(&[]);
        assert!(leave("Y=1;IgnoreUnknown=true").is_ok());
        assert!(leave("Y=1;IgnoreUnknown=0").is_err());
        assert!(leave("Y=1;IgnoreUnknown=maybe").is_err());
    }

    #[test]
    fn an_unknown_command_is_refused_by_name() {
        let error = Command::parse("FOO").unwrap_err();
        assert_eq!(error.code, Code::InvalidEnvironment);
        assert!(error.msg.contains("FOO"));
        assert!(Command::parse("add").is_err());
    }
}
