//! Where a tool runs: here, in a network namespace, in a container, on another node, in a pod.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tokio::process::Command;

use crate::kubectl::output_of;

/// One end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// This host.
    Local,
    /// A network namespace of this host; its file.
    Netns(PathBuf),
    /// The namespaces of a process of this host, such as a container's first.
    Process(u32),
    /// Another host, by ssh with a key.
    Ssh(String),
    /// A pod, by kubectl exec.
    Pod {
        /// Its namespace; kubectl's own default without.
        namespace: Option<String>,
        /// Its name.
        pod: String,
        /// Its container; kubectl's choice without.
        container: Option<String>,
    },
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "{text:?} is not a place: pod:[NAMESPACE/]NAME[/CONTAINER], ssh:[USER@]HOST, \
                 netns:NAME, pid:NUMBER or local"
            )
        };
        // What begins with a dash would be an option of kubectl or ssh.
        let word = |word: &str| {
            let fine = !word.is_empty() && !word.starts_with('-') && !word.contains(' ');
            fine.then(|| word.to_owned()).ok_or_else(expected)
        };
        if text == "local" {
            return Ok(Self::Local);
        }
        let (kind, rest) = text.split_once(':').ok_or_else(expected)?;
        let rest = word(rest)?;
        match kind {
            "netns" if rest.contains('/') => Ok(Self::Netns(rest.into())),
            "netns" => Ok(Self::Netns(PathBuf::from("/run/netns").join(rest))),
            "pid" => rest.parse().map(Self::Process).map_err(|_| expected()),
            "ssh" => Ok(Self::Ssh(rest)),
            "pod" => {
                let parts: Vec<String> = rest.split('/').map(word).collect::<Result<_, _>>()?;
                let (namespace, pod, container) = match parts.as_slice() {
                    [pod] => (None, pod, None),
                    [namespace, pod] => (Some(namespace), pod, None),
                    [namespace, pod, container] => (Some(namespace), pod, Some(container)),
                    _ => return Err(expected()),
                };
                Ok(Self::Pod {
                    namespace: namespace.cloned(),
                    pod: pod.clone(),
                    container: container.cloned(),
                })
            }
            _ => Err(expected()),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("this host"),
            Self::Netns(path) => write!(f, "netns {}", path.display()),
            Self::Process(pid) => write!(f, "process {pid}"),
            Self::Ssh(host) => write!(f, "host {host}"),
            Self::Pod { namespace, pod, .. } => match namespace {
                Some(namespace) => write!(f, "pod {namespace}/{pod}"),
                None => write!(f, "pod {pod}"),
            },
        }
    }
}

/// What a tool left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ended {
    /// It ended with 0.
    pub fine: bool,
    /// Both its streams, the error stream last.
    pub text: String,
}

impl Ended {
    /// The last line that says something: a client such as kubectl ends with what matters.
    pub(super) fn last(&self) -> &str {
        let mut lines = self.text.lines().map(str::trim);
        lines
            .rfind(|line| !line.is_empty())
            .unwrap_or("it said nothing")
    }

    /// The last lines, for a person.
    pub(super) fn tail(&self) -> String {
        const LINES: usize = 4;
        let lines = self
            .text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty());
        let lines: Vec<&str> = lines.collect();
        let last = lines.iter().skip(lines.len().saturating_sub(LINES));
        last.copied().collect::<Vec<_>>().join(" | ")
    }
}

/// How long a tool's end may take after its time is over.
const KILL_GRACE_PERIOD: Duration = Duration::from_secs(5);

impl Place {
    /// What to check when nothing can be run there.
    pub(super) fn remedy(&self) -> String {
        let way = match self {
            Self::Local => return "this host needs sh and timeout in its PATH".to_owned(),
            Self::Netns(_) => "does \"ip netns list\" name it? Entering it needs root".to_owned(),
            Self::Process(pid) => {
                format!("does process {pid} still run? Entering its namespaces needs root")
            }
            Self::Ssh(host) => format!(
                "\"ssh -o BatchMode=yes {host} true\" must work: with a key, without a question"
            ),
            Self::Pod {
                namespace,
                pod,
                container,
            } => {
                let flag = |flag: &str, value: &Option<String>| {
                    let value = value.as_ref();
                    value.map_or(String::new(), |value| format!("{flag} {value} "))
                };
                let (namespace, container) = (flag("-n", namespace), flag("-c", container));
                format!(
                    "\"kubectl exec {namespace}{pod} {container}-- true\" must work: a cluster in \
                     KUBECONFIG, a running pod, the right to exec into it"
                )
            }
        };
        format!("{way}; the place needs sh and timeout")
    }

    /// The command line that runs `argv` there; `kubectl` is the program and its first flags.
    pub(super) fn argv(&self, kubectl: &[String], argv: &[&str]) -> Vec<String> {
        let mut line: Vec<String> = Vec::new();
        let mut add = |words: &[&str]| line.extend(words.iter().map(|&word| word.to_owned()));
        match self {
            Self::Local => {}
            Self::Netns(path) => add(&["nsenter", &format!("--net={}", path.display()), "--"]),
            Self::Process(pid) => {
                add(&["nsenter", "-t", &pid.to_string(), "-m", "-n", "--"]);
            }
            Self::Ssh(host) => {
                add(&["ssh", "-o", "BatchMode=yes", host, "--"]);
                // ssh hands a string to the other side's shell.
                let quoted: Vec<String> = argv.iter().map(|word| quote(word)).collect();
                add(&[&quoted.join(" ")]);
                return line;
            }
            Self::Pod {
                namespace,
                pod,
                container,
            } => {
                let container = container.iter().flat_map(|name| ["-c", name]);
                let namespace = namespace.iter().flat_map(|name| ["-n", name]);
                let words = (kubectl.iter().map(String::as_str))
                    .chain(["exec"])
                    .chain(namespace)
                    .chain([pod.as_str()]);
                add(&words.chain(container).collect::<Vec<_>>());
                add(&["--"]);
            }
        }
        add(argv);
        line
    }

    /// Runs a tool there and waits for its end, at most `most`.
    ///
    /// The tool is run by `timeout` at the place itself: ending kubectl or ssh here does not end
    /// what they started there.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(super) async fn run(
        &self,
        kubectl: &[String],
        argv: &[&str],
        most: Duration,
    ) -> Result<Ended, String> {
        let seconds = most.as_secs().max(1).to_string();
        let mut there = vec!["timeout", &seconds];
        there.extend(argv);
        let line = self.argv(kubectl, &there);
        let (program, arguments) = line.split_first().ok_or("nothing to run")?;
        let mut command = Command::new(program);
        let output = output_of(command.args(arguments), b"", most + KILL_GRACE_PERIOD).await;
        let output = output.map_err(|error| format!("{error:#}"))?;
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stderr));
        // What timeout(1) ends with.
        if output.status.code() == Some(124) {
            text.push_str(&format!("\nit did not end in {seconds} s"));
        }
        Ok(Ended {
            fine: output.status.success(),
            text: plain(&text),
        })
    }
}

/// Text of a pod's, or of a file that somebody sent, without what could steer a terminal.
pub(super) fn plain(text: &str) -> String {
    let harmless = |c: &char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars().filter(harmless).collect()
}

fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(place: &str, argv: &[&str]) -> String {
        place
            .parse::<Place>()
            .unwrap()
            .argv(&["kubectl".to_owned()], argv)
            .join(" ")
    }

    #[test]
    fn each_place_has_its_way() {
        let ls = ["ls", "-l"];
        assert_eq!(line("local", &ls), "ls -l");
        assert_eq!(line("netns:a", &ls), "nsenter --net=/run/netns/a -- ls -l");
        assert_eq!(line("netns:/p/a", &ls), "nsenter --net=/p/a -- ls -l");
        assert_eq!(line("pid:12", &ls), "nsenter -t 12 -m -n -- ls -l");
        assert_eq!(
            line("ssh:me@host", &["sh", "-c", "echo 'a b'"]),
            r"ssh -o BatchMode=yes me@host -- 'sh' '-c' 'echo '\''a b'\'''"
        );
        assert_eq!(line("pod:p", &ls), "kubectl exec p -- ls -l");
        assert_eq!(line("pod:n/p/c", &ls), "kubectl exec -n n p -c c -- ls -l");
    }

    #[test]
    fn each_place_says_how_it_is_reached() {
        let remedy = |place: &str| place.parse::<Place>().unwrap().remedy();
        assert!(remedy("pod:hpc/a/main").contains("kubectl exec -n hpc a -c main -- true"));
        assert!(remedy("pod:a").contains("\"kubectl exec a -- true\""));
        assert!(remedy("ssh:me@host").contains("BatchMode=yes me@host true"));
        assert!(remedy("pid:7").contains("process 7"));
        assert!(remedy("netns:x").contains("ip netns list"));
    }

    #[test]
    fn what_a_pod_says_steers_no_terminal() {
        assert_eq!(plain("a\u{1b}[2J\tb\r\nc\u{9b}1m"), "a[2J\tb\nc1m");
    }

    #[test]
    fn no_word_becomes_an_option() {
        for text in [
            "",
            "here",
            "pod:",
            "pod:-it",
            "pod:a/-n",
            "pod:a/b/c/d",
            "ssh:-oProxyCommand=x",
            "pid:x",
            "pod:a b",
            "host:a",
        ] {
            let error = text.parse::<Place>().unwrap_err();
            assert!(error.contains("pod:[NAMESPACE/]NAME"), "{text}: {error}");
        }
    }
}
