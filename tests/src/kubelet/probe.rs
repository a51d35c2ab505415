//! Probes of a container by HTTP, as a kubelet makes them from the node.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::pod::Container;

/// A port that a container names.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerPort {
    /// Name, by which a probe may ask for it.
    #[serde(default)]
    pub name: String,
    /// Number.
    pub container_port: u16,
}

/// A question that a container has to answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Probe {
    /// Where it is asked.
    pub http_get: HttpGet,
    /// Seconds before the first question.
    #[serde(default)]
    pub initial_delay_seconds: u64,
    /// Seconds between two questions.
    #[serde(default = "ten")]
    pub period_seconds: u64,
    /// Seconds an answer may take.
    #[serde(default = "one")]
    pub timeout_seconds: u64,
    /// Unanswered questions before the container counts as failed.
    #[serde(default = "three")]
    pub failure_threshold: u64,
}

/// A page.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HttpGet {
    /// The address that is asked; the pod's unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<IpAddr>,
    /// Its path.
    pub path: String,
    /// A port's name or number.
    pub port: Port,
}

/// By name or number.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Port {
    /// Number.
    Number(u16),
    /// Name.
    Name(String),
}

fn one() -> u64 {
    1
}

fn three() -> u64 {
    3
}

fn ten() -> u64 {
    10
}

impl Probe {
    /// Asks once, at the pod's address.
    ///
    /// # Errors
    /// No answer, or one with a status other than 200 to 399.
    pub fn ask(&self, container: &Container, address: IpAddr) -> Result<()> {
        let port = match &self.http_get.port {
            Port::Number(port) => *port,
            Port::Name(name) => {
                let named = container.ports.iter().find(|port| port.name == *name);
                let named =
                    named.with_context(|| format!("{} has no port {name}", container.name))?;
                named.container_port
            }
        };
        let address = self.http_get.host.unwrap_or(address);
        let timeout = Duration::from_secs(self.timeout_seconds);
        let mut stream = TcpStream::connect_timeout(&SocketAddr::new(address, port), timeout)?;
        stream.set_read_timeout(Some(timeout))?;
        let path = &self.http_get.path;
        // As the kubelet's: a new connection each time.
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: {address}\r\nUser-Agent: kube-probe/1.34\r\n\
             Accept: */*\r\nConnection: close\r\n\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let status = answer
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok());
        match status {
            Some(200..400) => Ok(()),
            Some(status) => bail!("{path} answers {status}: {answer}"),
            None => bail!("{path} answers {answer:?}"),
        }
    }
}
