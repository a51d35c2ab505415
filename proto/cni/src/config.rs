//! The network configuration on stdin, and the whole request.

use serde::Deserialize;
use serde_json::{error::Category, value::RawValue};

use crate::{
    AttachmentId, CniResult, Code, Command, Dns, Environment, Error, Section, Version,
    env::{IDENTIFIER_RULE, is_identifier},
    json::{Members, Value},
};

/// The longest configuration that is read. A GC names every container of the network, which
/// is the only way to become large.
pub const MAX_BYTES: usize = 16 << 20;

/// The keys every plugin shares, and the object with all others.
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    /// The version the answer is written in.
    pub version: Version,
    /// The network's name: letters, digits, `_`, `.`, `-`.
    pub name: String,
    object: Value,
    raw: Vec<u8>,
}

impl NetworkConfig {
    /// Reads a configuration.
    ///
    /// # Errors
    /// Code 6 when it is not a JSON object or its version is not a number, code 1 for a version that
    /// is not supported, code 7 for a wrong name or a wrong type of a shared key.
    pub fn parse(raw: &[u8]) -> Result<Self, Error> {
        Self::of(object(raw, Err)?, raw)
    }

    /// Reads a configuration for DEL and GC, without the keys whose values cannot be read. ADD
    /// refuses such a configuration, and what was attached before it was written must come down.
    ///
    /// # Errors
    /// As [`NetworkConfig::parse`], for the other keys.
    pub fn parse_for_release(raw: &[u8]) -> Result<Self, Error> {
        Self::of(object(raw, |_| Ok(()))?, raw)
    }

    fn of(object: Value, raw: &[u8]) -> Result<Self, Error> {
        let root = Section::root(&object);
        let version = Version::parse(root.text("cniVersion")?.unwrap_or_default())?;
        let name: String = root
            .require("name")
            .map_err(|e| e.with_details("name the network"))?;
        if !is_identifier(&name) {
            let wrong = root.wrong("name", format_args!("{name:?} is not a network name"));
            return Err(wrong.with_details(IDENTIFIER_RULE));
        }
        let raw = raw.to_vec();
        Ok(NetworkConfig {
            version,
            name,
            object,
            raw,
        })
    }

    /// The version of a configuration that may be wrong in every other way, for the error
    /// about it; the newest where there is none to be read.
    pub fn version_of(raw: &[u8]) -> Version {
        let read = object(raw, |_| Ok(())).and_then(|object| {
            let root = Section::root(&object);
            Version::parse(root.text("cniVersion")?.unwrap_or_default())
        });
        read.unwrap_or(Version::NEWEST)
    }

    /// The bytes as they were read, for a delegate.
    pub fn raw(&self) -> &[u8] {
        &self.raw
    }

    /// The whole object.
    pub fn root(&self) -> Section<'_> {
        Section::root(&self.object)
    }

    /// `ipam`; no keys when it is absent.
    ///
    /// # Errors
    /// Code 7 when it is not an object.
    pub fn ipam(&self) -> Result<Section<'_>, Error> {
        self.root().section("ipam")
    }

    /// `ipam.type`; none when there is no IPAM, which means no addresses.
    ///
    /// # Errors
    /// Code 7 when it is not a text, or when `ipam` has keys but no type.
    pub fn ipam_type(&self) -> Result<Option<&str>, Error> {
        let ipam = self.ipam()?;
        let kind = ipam.text("type")?;
        if kind.is_none() && !ipam.is_empty() {
            return Err(Error::advise(
                Code::InvalidConfig,
                "ipam.type is missing",
                "name an IPAM plugin, or leave ipam out for an interface without addresses",
            ));
        }
        Ok(kind)
    }

    /// Refuses a configuration that has a key twice, or in two cases of letters: readers differ in
    /// which one they take, so whoever checked the network may have seen another value. The same for
    /// `ipam`: the program that is executed reads the document itself.
    ///
    /// # Errors
    /// Code 7 naming the key.
    pub fn has_each_key_once(&self) -> Result<(), Error> {
        let ipam = self.root().value("ipam").and_then(Value::repeated_key);
        let ipam = ipam.map(|key| format!("ipam.{key}"));
        match self.object.repeated_key().map(str::to_owned).or(ipam) {
            None => Ok(()),
            Some(key) => Err(Error::advise(
                Code::InvalidConfig,
                format_args!("{key} is there more than once"),
                "leave one of them, in one case of letters",
            )),
        }
    }

    /// `runtimeConfig`: what the runtime adds for the capabilities the configuration names.
    ///
    /// # Errors
    /// Code 7 when it is not an object.
    pub fn runtime_config(&self) -> Result<Section<'_>, Error> {
        self.root().section("runtimeConfig")
    }

    /// `args.cni`: what the pod's annotation adds.
    ///
    /// # Errors
    /// Code 7 when it is not an object.
    pub fn cni_args(&self) -> Result<Section<'_>, Error> {
        self.root().section("args")?.section("cni")
    }

    /// `dns` of the configuration.
    ///
    /// # Errors
    /// Code 7 naming the key that has a wrong type.
    pub fn dns(&self) -> Result<Dns, Error> {
        self.root().section("dns")?.decode()
    }

    /// What the plugins before this one answered; none when this is the first.
    ///
    /// # Errors
    /// Code 7 when there is one that cannot be read; see [`CniResult::parse`].
    pub fn prev_result(&self) -> Result<Option<CniResult>, Error> {
        self.root()
            .value("prevResult")
            .map(|value| CniResult::parse(value, Some(self.version)))
            .transpose()
            .map_err(|e| e.context("prevResult"))
    }

    /// The attachments GC must keep; none when the runtime did not say, in which case
    /// nothing may be removed.
    ///
    /// There are two keys: the specification's, and one that libcni wrote for a while and still writes
    /// beside it. The first one has priority.
    ///
    /// # Errors
    /// Code 7 naming the element that is not an attachment.
    pub fn valid_attachments(&self) -> Result<Option<Vec<AttachmentId>>, Error> {
        #[derive(Deserialize)]
        struct Valid {
            #[serde(rename = "cni.dev/valid-attachments")]
            valid: Option<Vec<AttachmentId>>,
            #[serde(rename = "cni.dev/attachments")]
            older: Option<Vec<AttachmentId>>,
        }
        let Valid { valid, older } = self.root().decode()?;
        Ok(valid.or(older))
    }
}

/// The members of a configuration, of which each is a document of its own: the parser reads no value
/// that is nested deeper than 128, but passes over any.
fn object(
    raw: &[u8],
    unreadable: impl Fn(serde_json::Error) -> Result<(), serde_json::Error>,
) -> Result<Value, Error> {
    if raw.iter().all(u8::is_ascii_whitespace) {
        return Err(Error::advise(
            Code::Decode,
            "network configuration on stdin is empty",
            "the runtime passes the configuration as JSON on stdin",
        ));
    }
    let read = || {
        let Members(members) = serde_json::from_slice::<Members<&RawValue>>(raw)?;
        let mut fields = Vec::with_capacity(members.len());
        for (key, value) in members {
            match serde_json::from_str(value.get()) {
                Ok(value) => fields.push((key, value)),
                Err(e) => unreadable(e)?,
            }
        }
        Ok(Value::Object(fields))
    };
    read().map_err(|e: serde_json::Error| {
        let (why, remedy) = match e.classify() {
            Category::Data => ("is not a JSON object: ", "write one object"),
            Category::Eof => (
                "is not JSON: ",
                "the configuration ends too early: write the whole file, then rename it into place",
            ),
            Category::Syntax | Category::Io => ("is not JSON: ", "correct it there"),
        };
        let msg = format!("network configuration on stdin {why}{e}");
        Error::advise(Code::Decode, msg, remedy)
    })
}

/// One call by the runtime: environment and configuration.
#[derive(Clone, Debug)]
pub struct Request {
    /// Command, container, interface, namespace, `CNI_ARGS`, `CNI_PATH`.
    pub env: Environment,
    /// The configuration on stdin.
    pub config: NetworkConfig,
}

impl Request {
    /// The command.
    pub fn command(&self) -> Command {
        self.env.command
    }

    /// Container and interface.
    ///
    /// # Errors
    /// Code 4 for a command that has none; [`Environment::read`] has refused ADD, DEL and
    /// CHECK without them.
    pub fn attachment(&self) -> Result<&AttachmentId, Error> {
        self.env.attachment.as_ref().ok_or_else(|| {
            let msg = format!("{} has no container and interface", self.env.command);
            Error::new(Code::InvalidEnvironment, msg)
        })
    }

    /// Refuses a command that the configuration's version does not have.
    ///
    /// # Errors
    /// Code 1.
    pub fn command_exists_in_version(&self) -> Result<(), Error> {
        let since = match self.env.command {
            Command::Check => Version::V0_4_0,
            Command::Status | Command::Gc => Version::V1_1_0,
            Command::Add | Command::Del | Command::Version => return Ok(()),
        };
        if self.config.version >= since {
            return Ok(());
        }
        let (command, version) = (self.env.command, self.config.version);
        Err(Error::advise(
            Code::IncompatibleVersion,
            format_args!("{command} does not exist in cniVersion {version}"),
            format_args!("set cniVersion to {since} or newer"),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Args;

    fn parse(text: &str) -> Result<NetworkConfig, Error> {
        NetworkConfig::parse(text.as_bytes())
    }

    #[test]
    fn a_value_that_is_nested_too_deep_stops_add_and_never_del() {
        let deep = |levels: usize| {
            let (open, close) = ("[".repeat(levels), "]".repeat(levels));
            format!(r#"{{"x":{open}{close},"cniVersion":"0.4.0","name":"a","prevResult":{{}}}}"#)
        };
        for levels in [200, 100_000] {
            let text = deep(levels);
            assert_eq!(parse(&text).unwrap_err().code, Code::Decode);
            let config = NetworkConfig::parse_for_release(text.as_bytes()).unwrap();
            assert_eq!((config.version, &*config.name), (Version::V0_4_0, "a"));
            assert_eq!(config.root().value("x"), None);
            assert!(config.root().value("prevResult").is_some());
            assert_eq!(NetworkConfig::version_of(text.as_bytes()), Version::V0_4_0);
        }
        // A configuration without a name, or that is not JSON, stays wrong.
        for (text, code) in [
            ("{", Code::Decode),
            ("[]", Code::Decode),
            (r#"{"cniVersion":"1.0.0"}"#, Code::InvalidConfig),
            (&deep(200).replace("\"a\"", "\"-\""), Code::InvalidConfig),
        ] {
            let read = NetworkConfig::parse_for_release(text.as_bytes());
            assert_eq!(read.unwrap_err().code, code, "{text}");
        }
    }

    #[test]
    fn no_version_means_the_first_which_is_not_supported() {
        let error = parse(r#"{"name":"a"}"#).unwrap_err();
        assert_eq!(error.code, Code::IncompatibleVersion);
        assert_eq!(
            NetworkConfig::version_of(br#"{"cniVersion":"0.4.0"}"#),
            Version::V0_4_0
        );
        assert_eq!(NetworkConfig::version_of(b"nonsense"), Version::NEWEST);
        assert_eq!(
            NetworkConfig::version_of(br#"{"cniVersion":"7"}"#),
            Version::NEWEST
        );
    }

    #[test]
    fn the_specifications_gc_key_is_believed_before_the_older_one() {
        let one = |text: &str| parse(text).unwrap().valid_attachments();
        assert_eq!(one(r#"{"cniVersion":"1.0.0","name":"a"}"#), Ok(None));
        assert_eq!(
            one(r#"{"cniVersion":"1.0.0","name":"a","cni.dev/valid-attachments":null}"#),
            Ok(None)
        );
        assert_eq!(
            one(r#"{"cniVersion":"1.0.0","name":"a","cni.dev/attachments":[]}"#),
            Ok(Some(vec![]))
        );
        let both = one(
            r#"{"cniVersion":"1.0.0","name":"a","cni.dev/attachments":[],
                "cni.dev/valid-attachments":[{"containerID":"c","ifname":"net1"}]}"#,
        )
        .unwrap()
        .unwrap();
        assert_eq!(both.len(), 1);
        assert_eq!(both[0].to_string(), "net1 of container c");
        for wrong in [
            r#"{}"#,
            // What is left of the list would not keep what the element was to keep.
            r#"[null]"#,
            r#"[{"containerID":"c","ifname":"net1"}, null]"#,
            r#"[{"containerID":null,"ifname":"net1"}]"#,
            r#"[1]"#,
            r#"[{"containerID":"c"}]"#,
            r#"[{"containerID":"-","ifname":"a"}]"#,
        ] {
            let text = format!(
                r#"{{"cniVersion":"1.0.0","name":"a","cni.dev/valid-attachments":{wrong}}}"#
            );
            assert_eq!(one(&text).unwrap_err().code, Code::InvalidConfig, "{wrong}");
        }
    }

    #[test]
    fn a_key_that_is_there_twice_is_refused() {
        for (ipam, once) in [
            (r#""ipam":{"type":"a"}"#, true),
            (r#""dns":{}"#, true),
            (r#""ipam":null"#, true),
            (r#""ipam":{"type":"a","range":1,"range":2}"#, false),
            (r#""ipam":{"type":"a","type":"b"}"#, false),
            (r#""ipam":{"type":"a","TYPE":"a"}"#, false),
            (r#""ipam":{"type":"a","ty\u0070e":"b"}"#, false),
            (r#""ipam":{"type":"a"},"ipam":{"type":"b"}"#, false),
            (r#""IPAM":{"type":"a"},"ipam":{}"#, false),
            (r#""master":"a","ma\u017fter":"b""#, false),
        ] {
            let config = parse(&format!(r#"{{"cniVersion":"1.0.0","name":"a",{ipam}}}"#)).unwrap();
            assert_eq!(config.has_each_key_once().is_ok(), once, "{ipam}");
        }
    }

    #[test]
    fn an_ipam_without_type_is_refused_and_an_empty_one_means_none() {
        let kind = |text: &str| {
            parse(text)
                .unwrap()
                .ipam_type()
                .map(|k| k.map(str::to_owned))
        };
        assert_eq!(kind(r#"{"cniVersion":"1.0.0","name":"a"}"#), Ok(None));
        assert_eq!(
            kind(r#"{"cniVersion":"1.0.0","name":"a","ipam":{}}"#),
            Ok(None)
        );
        assert_eq!(
            kind(r#"{"cniVersion":"1.0.0","name":"a","IPAM":{"Type":"static"}}"#),
            Ok(Some("static".into()))
        );
        assert!(
            kind(r#"{"cniVersion":"1.0.0","name":"a","ipam":{"range":"10.0.0.0/8"}}"#).is_err()
        );
        assert!(kind(r#"{"cniVersion":"1.0.0","name":"a","ipam":[]}"#).is_err());
    }

    fn request(command: Command, config: &str, args: &str) -> Request {
        Request {
            env: Environment {
                command,
                attachment: None,
                netns: None,
                args: Args::parse(args).unwrap(),
                path: Vec::new(),
                netns_override: false,
            },
            config: parse(config).unwrap(),
        }
    }
    #[test]
    fn commands_exist_since_their_version() {
        for (command, version, exists) in [
            (Command::Check, "0.3.1", false),
            (Command::Check, "0.4.0", true),
            (Command::Status, "1.0.0", false),
            (Command::Gc, "1.0.0", false),
            (Command::Gc, "1.1.0", true),
            (Command::Del, "0.3.0", true),
        ] {
            let request = request(
                command,
                &format!(r#"{{"name":"a","cniVersion":"{version}"}}"#),
                "",
            );
            assert_eq!(
                request.command_exists_in_version().is_ok(),
                exists,
                "{command:?} {version}"
            );
        }
    }
}
