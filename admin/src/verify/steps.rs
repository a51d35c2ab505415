//! The steps, from the ends' devices up to GPU memory, for each pair of ports.
//!
//! A pair that fails a step is not tried on the next: what stands on a broken step fails with a
//! message that misleads. Only `rping` carries nothing: `ib_write_bw` connects without `rdma_cm`.
//! Nothing is left running: each tool is run by `timeout` where it runs.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::verdict::{Finding, Outcome, Verdict};

use super::Verify;
use super::ends::{self, End, Port};
use super::judge::{self, Memory};
use super::pod::{PodRef, ToolEnd};
use super::{causes, perftest, ping};

/// A step: its id, and what should be so.
pub(super) type Step = (&'static str, &'static str);

pub(super) const ENDS: Step = (
    "ends",
    "both ends have an RDMA device, a port and an address",
);
pub(super) const PING: Step = ("ping", "packets go over the network's interface");
pub(super) const RPING: Step = ("rping", "the RDMA connection manager connects");
pub(super) const WRITE_BW: Step = ("write-bw", "ib_write_bw transfers data at the line rate");
pub(super) const GPU: Step = (
    "gpu",
    "ib_write_bw transfers data at the line rate between GPUs' memory",
);

/// The steps that can be chosen, in their order.
pub(super) const CHOICE: [Step; 4] = [PING, RPING, WRITE_BW, GPU];

/// Numbers that a tool printed.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Measurement {
    /// The step.
    pub step: &'static str,
    /// The pair of ports.
    pub object: String,
    /// The lines of its table.
    pub rows: Vec<perftest::PerftestRow>,
}

/// What was found.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Tested {
    /// Each step.
    #[serde(rename = "checks")]
    pub outcomes: Vec<Outcome>,
    /// What was measured.
    pub measurements: Vec<Measurement>,
    /// What findings call each pair of ports, and the rail of each end.
    #[serde(skip)]
    pub pairs: Vec<(String, [String; 2])>,
    /// What each end has.
    #[serde(skip)]
    pub ends: [End; 2],
}

/// Why a step was not tried within its pair's time.
const TIME_OVER: &str = "not tried: the time of this pair of nodes is over";
/// Why a step says nothing; somebody who knows that ping is filtered leaves that out.
const NOT_TRIED: &str = "not tried: an earlier step failed; --skip leaves that one out";
/// The same where there is no pair of ports: the ends themselves cannot be left out.
const NO_PAIR: &str = "not tried: there is no pair of ports, see the ends";
/// How long a server may take to listen, at least; half of what it may take at all, where that is
/// more: a busy API server starts a command in a pod in its own time.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(15);
/// Between two tries of a client.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// What clients say while the server does not listen yet.
const REFUSED: [&str; 5] = [
    "Couldn't connect",
    "Connection refused",
    "Unable to connect",
    "RDMA_CM_EVENT_REJECTED",
    "Failed to connect",
];

struct PairTest<'a> {
    flags: &'a Verify,
    kubectl: &'a [String],
    ends: [&'a PodRef; 2],
    until: Option<Instant>,
    next_port: u16,
    tested: Tested,
}

/// How long an end may take to say what it has, at most: it starts no tool.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);

/// Tests a pair; `kubectl` is the program and its first flags. No tool runs after `until`, also not at the
/// ends. `progress` is called with what is done now.
pub(super) async fn test_pair(
    flags: &Verify,
    kubectl: &[String],
    ends: [&PodRef; 2],
    until: Option<Instant>,
    progress: &dyn Fn(&str),
) -> Tested {
    let mut test = PairTest {
        flags,
        kubectl,
        ends,
        until,
        next_port: flags.port,
        tested: Tested::default(),
    };
    let [at_server, at_client] = ends;
    progress(&format!("{}: {at_server} and {at_client}", ENDS.0));
    let (server, client) = tokio::join!(test.probe(at_server), test.probe(at_client));
    let mut findings = vec![end(at_server, &server), end(at_client, &client)];
    let (server, client) = (server.unwrap_or_default(), client.unwrap_or_default());
    let pairs = ends::pairs(&server, &client);
    if pairs.is_empty() && findings.iter().all(|f| f.verdict == Verdict::Pass) {
        findings.push(Finding::fail(
            "no port of one end belongs to one of the other",
            "give --interface or --device",
        ));
    }
    test.outcome(ENDS, findings);
    let names = |(ours, theirs): &(&Port, &Port)| {
        let rails = [ours.rail(), theirs.rail()];
        (object(ours, theirs), rails)
    };
    test.tested.pairs = pairs.iter().map(names).collect();
    test.tested.ends = [&server, &client].map(End::clone);
    // Which of the pairs failed a step.
    let mut broken = vec![false; pairs.len()];
    for step in CHOICE.into_iter().filter(|step| flags.wants(step.0)) {
        let mut findings = Vec::new();
        for ((ours, theirs), broken) in pairs.iter().zip(&mut broken) {
            let object = object(ours, theirs);
            progress(&format!("{}: {object}", step.0));
            let finding = match (step, flags.gpu) {
                _ if *broken => Finding::not_applicable(NOT_TRIED),
                _ if test.left() == Some(Duration::ZERO) => Finding::unknown(TIME_OVER),
                (PING, _) => test.ping(ours, theirs).await,
                (RPING, _) => test.rping(&server, &client, ours).await,
                (WRITE_BW, _) => test.write_bw(&server, ours, theirs, None).await,
                (_, None) => Finding::not_applicable("no GPU was named (--gpu)"),
                (_, gpu) => test.write_bw(&server, ours, theirs, gpu).await,
            };
            *broken |= finding.verdict == Verdict::Fail && step != RPING;
            findings.push(finding.on(object));
        }
        if findings.is_empty() {
            findings.push(Finding::not_applicable(NO_PAIR));
        }
        test.outcome(step, findings);
    }
    test.tested
}

fn object(server: &Port, client: &Port) -> String {
    let (server, client) = (server.name(), client.name());
    if server == client {
        server
    } else {
        format!("{server} and {client}")
    }
}

fn end(place: &PodRef, end: &Result<End, String>) -> Finding {
    let finding = match end {
        Err(error) => Finding::fail(format!("it could not be probed: {error}"), place.remedy()),
        Ok(end) if end.ports.is_empty() => {
            let no_port = std::iter::once("no port can be tested");
            let why: Vec<&str> = no_port.chain(end.left.iter().map(String::as_str)).collect();
            Finding::fail(
                why.join("; "),
                "the container must ask for the resource, and the pod for the network; see \
                 \"rdmactl status\" and discover on its node",
            )
        }
        Ok(end) => {
            let names: Vec<String> = end.ports.iter().map(Port::name).collect();
            Finding::pass(names.join(", "))
        }
    };
    let finding = finding.on(place.to_string());
    let Ok(end) = end else { return finding };
    end.ports.iter().fold(finding, |finding, port| {
        let mut facts = Vec::new();
        facts.extend(port.address.map(|address| address.to_string()));
        facts.extend(port.gid_index.map(|index| format!("GID index {index}")));
        facts.extend(port.mtu.map(|mtu| format!("MTU {mtu}")));
        facts.extend(port.rate.map(|rate| format!("{rate} Gb/s")));
        finding.read(port.name(), facts.join(", "))
    })
}

impl PairTest<'_> {
    fn outcome(&mut self, (id, title): Step, findings: Vec<Finding>) {
        self.tested.outcomes.push(Outcome::new(id, title, findings));
    }

    async fn probe(&self, place: &PodRef) -> Result<End, String> {
        let argv = ["sh", "-c", ends::PROBE];
        let most = self.timeout().min(PROBE_TIMEOUT);
        let mut ended = place.run(self.kubectl, &argv, most).await;
        if !ended.as_ref().is_ok_and(|ended| ended.fine) {
            // A connection can break.
            ended = place.run(self.kubectl, &argv, most).await;
        }
        let ended = ended?;
        if !ended.fine {
            return Err(ended.tail());
        }
        let (interface, device) = (
            self.flags.interface.as_deref(),
            self.flags.device.as_deref(),
        );
        Ok(ends::read(&ended.text, interface, device))
    }

    fn left(&self) -> Option<Duration> {
        Some(self.until?.saturating_duration_since(Instant::now()))
    }

    /// How long a tool may take.
    fn timeout(&self) -> Duration {
        let most = Duration::from_secs(self.flags.timeout);
        let most = self.left().map_or(most, |left| most.min(left));
        most.max(Duration::from_secs(1))
    }

    async fn ping(&self, server: &Port, client: &Port) -> Finding {
        let (Some(address), Some(netdev)) = (server.address, &client.netdev) else {
            return Finding::not_applicable("the port has no IP address");
        };
        let ping = |flags: &str| {
            let line = format!("ping -W 2 -I {netdev} {flags} {address}");
            async move { self.run(self.ends[1], &line).await }
        };
        let ended = ping("-c 3").await;
        let Some(echoes) = ping::read(&ended.text) else {
            let (why, remedy) = meaning(&ended.text, "ping");
            return Finding::unsure(why, remedy).read("ping", ended.tail());
        };
        let average = echoes
            .average
            .map_or(String::new(), |ms| format!(", {ms} ms"));
        let read = format!("{} of {} came back{average}", echoes.received, echoes.sent);
        if echoes.received == 0 {
            return Finding::fail(
                "no packet comes back over this interface",
                "are both ends in one subnet or routed to each other, on one rail, on one VLAN; \
                 is the uplink of a macvlan up; does a filter drop ICMP?",
            )
            .read("ping", read);
        }
        let mtu = server.mtu.min(client.mtu).filter(|&mtu| mtu > 1500);
        if let (Some(mtu), Some(IpAddr::V4(_))) = (mtu, server.address) {
            // RFC 791 and 792: 20 bytes of IPv4, 8 of ICMP.
            let large = ping(&format!("-c 1 -M do -s {}", mtu - 28)).await;
            if ping::read(&large.text).is_some_and(|echoes| echoes.received == 0) {
                return Finding::warn(
                    format!("packets of the interface's MTU of {mtu} bytes do not get through"),
                    "raise the MTU of the switch and of the other end, or lower this one: RDMA \
                     sends packets of this size",
                )
                .read("ping", read);
            }
        }
        if echoes.received < echoes.sent {
            return Finding::warn(
                "packets are lost",
                "check the link's error counters (rdma_device_plugin_port_errors_total)",
            )
            .read("ping", read);
        }
        Finding::pass("packets go there and back").read("ping", read)
    }

    async fn rping(&mut self, server: &End, client: &End, port: &Port) -> Finding {
        let Some(address) = port.address else {
            return Finding::not_applicable("the port has no IP address");
        };
        for (place, end) in self.ends.into_iter().zip([server, client]) {
            if !end.connection_manager {
                return Finding::not_applicable(format!(
                    "{place} has no /dev/infiniband/rdma_cm: only programs that use rdma_cm miss it"
                ));
            }
            if !end.tools.iter().any(|tool| tool == "rping") {
                return Finding::not_applicable(format!("{place} has no rping (rdmacm-utils)"));
            }
        }
        const COUNT: usize = 5;
        let tcp = self.take_port();
        let line = |end: &str| format!("rping {end} -v -C {COUNT} -a {address} -p {tcp}");
        let (server, client) = self.both(&line("-s"), &line("-c")).await;
        // Its exit status is not 0 when the other end hangs up first.
        let echoes = client.text.matches("ping data: ").count();
        if echoes >= COUNT {
            return Finding::pass("connected, written and read")
                .read("rping", format!("{echoes} echoes"));
        }
        failed(&server, &client, "rping")
    }

    async fn write_bw(
        &mut self,
        server: &End,
        ours: &Port,
        theirs: &Port,
        gpu: Option<u32>,
    ) -> Finding {
        let Some(address) = ours.address.or(server.control) else {
            return Finding::unknown("the server has no address to be reached at");
        };
        let soft = ours.soft || theirs.soft;
        let tcp = self.take_port();
        let line = |port: &Port| {
            let mut line = format!("ib_write_bw -d {} -i {}", port.device, port.port);
            if let Some(index) = port.gid_index {
                line += &format!(" -x {index}");
            }
            line += &format!(" -F -q 1 --report_gbits -p {tcp}");
            // All sizes show where a curve is flat; a processor would take hours for them.
            line += if soft { " -s 65536 -n 200" } else { " -a" };
            if let Some(gpu) = gpu {
                line += &format!(" --use_cuda={gpu}");
                line += if self.flags.dmabuf {
                    " --use_cuda_dmabuf"
                } else {
                    ""
                };
            }
            line
        };
        let calling = format!("{} {address}", line(theirs));
        let (server, client) = self.both(&line(ours), &calling).await;
        let run = perftest::read(&client.text);
        if !client.fine || run.rows.is_empty() {
            return failed(&server, &client, "ib_write_bw");
        }
        let (step, memory) = match gpu {
            Some(_) => (GPU, Memory::Gpu),
            None => (WRITE_BW, Memory::Host),
        };
        self.tested.measurements.push(Measurement {
            step: step.0,
            object: object(ours, theirs),
            rows: run.rows.clone(),
        });
        let slower = match (ours.rate, theirs.rate) {
            // Its nominal rate is not what a processor reaches.
            _ if soft => None,
            (Some(ours), Some(theirs)) => Some(ours.min(theirs)),
            (one, other) => one.or(other),
        };
        judge::bandwidth(&run, self.flags.line_rate.or(slower), memory)
    }

    fn take_port(&mut self) -> u16 {
        let port = self.next_port;
        self.next_port = port.checked_add(1).unwrap_or(self.flags.port);
        port
    }

    /// Runs a command line without quotes.
    async fn run(&self, place: &PodRef, line: &str) -> ToolEnd {
        let argv: Vec<&str> = line.split(' ').collect();
        let ended = place.run(self.kubectl, &argv, self.timeout()).await;
        ended.unwrap_or_else(|text| ToolEnd { fine: false, text })
    }

    /// Runs a server and a client, the client again until the server listens.
    async fn both(&self, server: &str, client: &str) -> (ToolEnd, ToolEnd) {
        let listening = self.run(self.ends[0], server);
        let calling = async {
            let started = Instant::now();
            let listen_timeout = LISTEN_TIMEOUT.max(self.timeout() / 2);
            loop {
                tokio::time::sleep(RETRY_INTERVAL).await;
                let ended = self.run(self.ends[1], client).await;
                let refused = REFUSED.iter().any(|word| ended.text.contains(word));
                if ended.fine || !refused || started.elapsed() > listen_timeout {
                    return ended;
                }
            }
        };
        tokio::pin!(listening, calling);
        // What the other one may still have to say once the first has ended.
        const OTHER_END_TIMEOUT: Duration = Duration::from_secs(5);
        let late = |what: &str| ToolEnd {
            fine: false,
            text: format!("the {what} was still running"),
        };
        tokio::select! {
            server = &mut listening => {
                let client = tokio::time::timeout(OTHER_END_TIMEOUT, calling).await;
                (server, client.unwrap_or_else(|_| late("client")))
            }
            client = &mut calling => {
                let server = tokio::time::timeout(OTHER_END_TIMEOUT, listening).await;
                (server.unwrap_or_else(|_| late("server")), client)
            }
        }
    }
}

/// A tool failed at one of the ends or both.
fn failed(server: &ToolEnd, client: &ToolEnd, tool: &str) -> Finding {
    let text = format!("{}\n{}", client.text, server.text);
    let (why, remedy) = meaning(&text, tool);
    Finding::fail(why, remedy)
        .read("client", client.tail())
        .read("server", server.tail())
}

fn meaning(text: &str, tool: &str) -> (String, &'static str) {
    match causes::of(text) {
        Some(cause) => (cause.why.to_owned(), cause.remedy),
        None => (
            format!("{tool} failed"),
            "see its last lines; run it by hand at both ends",
        ),
    }
}
