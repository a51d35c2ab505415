//! An end: a pod, whose tools run by `kubectl exec` with the rights of its container.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use tokio::process::Command;

use crate::kubectl::output_of;

/// A pod, as the command line names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PodRef {
    /// `None`: kubectl's own default.
    pub namespace: Option<String>,
    pub name: String,
    /// `None`: kubectl's choice.
    pub container: Option<String>,
}

impl FromStr for PodRef {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("{text:?} is not pod:[NAMESPACE/]NAME[/CONTAINER]");
        // What begins with a dash would be an option of kubectl.
        let word = |word: &str| {
            let fine = !word.is_empty() && !word.starts_with('-') && !word.contains(' ');
            fine.then(|| word.to_owned()).ok_or_else(expected)
        };
        let words = text.strip_prefix("pod:").ok_or_else(expected)?;
        let words: Vec<String> = words.split('/').map(word).collect::<Result<_, _>>()?;
        let (namespace, name, container) = match words.as_slice() {
            [name] => (None, name, None),
            [namespace, name] => (Some(namespace), name, None),
            [namespace, name, container] => (Some(namespace), name, Some(container)),
            _ => return Err(expected()),
        };
        Ok(Self {
            namespace: namespace.cloned(),
            name: name.clone(),
            container: container.cloned(),
        })
    }
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match &self.namespace {
            Some(namespace) => write!(f, "pod {namespace}/{name}"),
            None => write!(f, "pod {name}"),
        }
    }
}

/// What a tool left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ToolEnd {
    /// It ended with 0.
    pub fine: bool,
    /// Both its streams, the error stream last.
    pub text: String,
}

impl ToolEnd {
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
        match lines.is_empty() {
            true => "it said nothing".to_owned(),
            false => last.copied().collect::<Vec<_>>().join(" | "),
        }
    }
}

/// How long a tool's end may take after its time is over.
const KILL_GRACE_PERIOD: Duration = Duration::from_secs(5);

impl PodRef {
    /// What to check when nothing can be run there.
    pub(super) fn remedy(&self) -> String {
        let line = self.argv(&["kubectl".to_owned()], &["true"]).join(" ");
        format!(
            "\"{line}\" must work: a cluster in KUBECONFIG, a running pod, the right to exec into it; \
             the container needs sh and timeout"
        )
    }

    /// The command line that runs `argv` there; `kubectl` is the program and its first flags.
    fn argv(&self, kubectl: &[String], argv: &[&str]) -> Vec<String> {
        let container = self.container.iter().flat_map(|name| ["-c", name]);
        let namespace = self.namespace.iter().flat_map(|name| ["-n", name]);
        let words = (kubectl.iter().map(String::as_str))
            .chain(["exec"])
            .chain(namespace)
            .chain([self.name.as_str()])
            .chain(container)
            .chain(["--"]);
        words
            .chain(argv.iter().copied())
            .map(str::to_owned)
            .collect()
    }

    /// Runs a tool there and waits for its end, at most `most`.
    ///
    /// The tool is run by `timeout` in the pod: ending kubectl here does not end what it started
    /// there.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(super) async fn run(
        &self,
        kubectl: &[String],
        argv: &[&str],
        most: Duration,
    ) -> Result<ToolEnd, String> {
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
        Ok(ToolEnd {
            fine: output.status.success(),
            text: plain(&text),
        })
    }
}

/// Text of a pod's, without what could steer a terminal.
fn plain(text: &str) -> String {
    let harmless = |c: &char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars().filter(harmless).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_runs_in_the_pod_by_kubectl_exec() {
        let line = |pod: &str| {
            let pod = pod.parse::<PodRef>().unwrap();
            pod.argv(&["kubectl".to_owned()], &["ls", "-l"]).join(" ")
        };
        assert_eq!(line("pod:p"), "kubectl exec p -- ls -l");
        assert_eq!(line("pod:n/p"), "kubectl exec -n n p -- ls -l");
        assert_eq!(line("pod:n/p/c"), "kubectl exec -n n p -c c -- ls -l");
    }

    #[test]
    fn the_remedy_is_a_command_that_must_work() {
        let remedy = |pod: &str| pod.parse::<PodRef>().unwrap().remedy();
        assert!(remedy("pod:hpc/a/main").contains("\"kubectl exec -n hpc a -c main -- true\""));
        assert!(remedy("pod:a").contains("\"kubectl exec a -- true\""));
    }

    #[test]
    fn what_a_pod_says_steers_no_terminal() {
        assert_eq!(plain("a\u{1b}[2J\tb\r\nc\u{9b}1m"), "a[2J\tb\nc1m");
    }

    #[test]
    fn what_is_not_a_pod_is_refused() {
        for text in [
            "",
            "here",
            "pod:",
            "pod:-it",
            "pod:a/-n",
            "pod:a/b/c/d",
            "pod:a b",
            "local",
            "pid:1",
            "netns:a",
            "ssh:host",
            "host:a",
        ] {
            let error = text.parse::<PodRef>().unwrap_err();
            assert!(error.contains("pod:[NAMESPACE/]NAME"), "{text}: {error}");
        }
    }
}
