//! The conformance vectors: each is run through the binary's CNI face in both
//! profiles. `expect` is the compatible profile, `recommended` the strict one
//! where it is given. What is not run, or expected otherwise than the file
//! says, is listed here with its reason; anything else is a failure.

use crate::support::{Answer, Attachment, Place, network};
use serde_json::{Value, json};
use std::net::IpAddr;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Profile {
    Compatible,
    Strict,
}

use Profile::{Compatible, Strict};

/// What a vector is tried on.
#[derive(Clone, Copy, Debug)]
struct Run {
    profile: Profile,
    store: StoreKind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StoreKind {
    File,
    /// Of a node that has all addresses as its blocks.
    Kubernetes,
}

/// Vectors whose expectation is not ours, and why. The reason is checked for
/// use: an entry that matches no vector fails the test.
const OTHERWISE: [(&str, Profile, Ours, &str); 25] = [
    (
        "v075",
        Compatible,
        Ours::Address("10.5.0.50/24"),
        "an address that is not leased can be another pod's: the one asked for is leased, and no other",
    ),
    (
        "v076",
        Compatible,
        Ours::Address("10.5.0.50/24"),
        "as v075; its range says the prefix length",
    ),
    (
        "v024",
        Compatible,
        Ours::Address("192.168.1.2/24"),
        "the address of a sandbox that had no DEL is reclaimed, not taken over",
    ),
    (
        "v024",
        Strict,
        Ours::Address("192.168.1.2/24"),
        "the address of a sandbox that had no DEL is reclaimed, not taken over",
    ),
    (
        "v074",
        Compatible,
        Ours::Address("10.5.0.1/24"),
        "the address of a sandbox that had no DEL is reclaimed, not taken over",
    ),
    (
        "v045",
        Compatible,
        Ours::Address("10.0.0.2/24"),
        "a gateway is leased to nobody",
    ),
    (
        "v224",
        Compatible,
        Ours::Each(&["192.168.1.1/24", "192.168.1.2/24", "192.168.1.1/24"]),
        "the next sandbox has another address, which a late DEL of the first one does not free",
    ),
    (
        "v224",
        Strict,
        Ours::Each(&["192.168.1.1/24", "192.168.1.2/24", "192.168.1.3/24"]),
        "the next sandbox has another address, which a late DEL of the first one does not free",
    ),
    (
        "v003",
        Compatible,
        Ours::Address("::2/126"),
        "::1 is an address of this node",
    ),
    (
        "v003",
        Strict,
        Ours::Refused,
        "::/126 has the loopback address, which no interface of a pod can have",
    ),
    (
        "v055",
        Strict,
        Ours::Refused,
        "a number with a leading zero may be meant as octal: it is refused",
    ),
    (
        "v088",
        Strict,
        Ours::Refused,
        "a number with a leading zero may be meant as octal: it is refused",
    ),
    (
        "v091",
        Strict,
        Ours::Refused,
        "a number with a leading zero may be meant as octal: it is refused",
    ),
    (
        "v073",
        Strict,
        Ours::Address("10.5.0.16/24"),
        "an address that the network excludes by now is released",
    ),
    (
        "v231",
        Compatible,
        Ours::Kept,
        "an address whose sandbox lives is not freed",
    ),
    (
        "v111",
        Strict,
        Ours::Refused,
        "bounds outside the range are refused, as v051 recommends",
    ),
    (
        "v112",
        Strict,
        Ours::Refused,
        "inverted bounds are refused, as v048 recommends",
    ),
    (
        "v120",
        Strict,
        Ours::Refused,
        "bounds outside the range are refused, as v051 recommends",
    ),
    (
        "v121",
        Strict,
        Ours::Refused,
        "inverted bounds are refused, as v048 recommends",
    ),
    (
        "v124",
        Strict,
        Ours::Window("192.168.21.100", "192.168.21.101"),
        "/31 is usable, as v061 recommends",
    ),
    (
        "v100",
        Compatible,
        Ours::Address("192.168.1.1/24"),
        "leases are in the policy's store: no kubeconfig is needed",
    ),
    (
        "v100",
        Strict,
        Ours::Address("192.168.1.1/24"),
        "leases are in the policy's store: no kubeconfig is needed",
    ),
    (
        "v101",
        Compatible,
        Ours::Address("192.168.1.1/24"),
        "a flat file is optional here",
    ),
    (
        "v104",
        Compatible,
        Ours::Refused,
        "an ADD is refused by both; only a load without ADD, which CNI has not, passes",
    ),
    (
        "v226",
        Compatible,
        Ours::Leaked,
        "a DEL that leaks is a defect and not a leniency: nothing leaks",
    ),
];

#[derive(Clone, Copy)]
enum Ours {
    Refused,
    Address(&'static str),
    /// Of the ADDs of a sequence.
    Each(&'static [&'static str]),
    Window(&'static str, &'static str),
    Leaked,
    Kept,
}

fn vectors() -> Vec<Value> {
    let text = include_str!("../fixtures/ipam-vectors.json");
    serde_json::from_str(text).unwrap()
}

fn place(run: Run, flat: Option<&Value>) -> Place {
    let name = if run.profile == Strict {
        "strict"
    } else {
        "compatible"
    };
    let mut ipam = json!({"profile": name});
    // Resting is the policy's business and not whereabouts': off for `expect`.
    if run.profile == Compatible {
        ipam["cooldown"] = json!("0");
    }
    let place = match run.store {
        StoreKind::File => Place::new(),
        StoreKind::Kubernetes => Place::with_all_blocks(),
    };
    if let Some(flat) = flat {
        let path = place.path().join("whereabouts.conf");
        std::fs::write(&path, flat.to_string()).unwrap();
        ipam["flatFile"] = json!(path);
    }
    place.set_policy(json!({"ipam": ipam}));
    place
}

/// Puts a lease of a network at one address, with a range narrowed to it.
fn reserve(place: &Place, config: &Value, reserved: &Value, number: usize) {
    let (first, last) = match reserved.get("ip") {
        Some(ip) => (ip, ip),
        None => (&reserved["ip_first"], &reserved["ip_last"]),
    };
    let [first, last]: [IpAddr; 2] = [first, last].map(|ip| ip.as_str().unwrap().parse().unwrap());
    let pod = reserved["pod"].as_str().unwrap();
    let mut at = first;
    let mut count = 0;
    loop {
        // One container holds one address of a range; the file's fillers share a name.
        let filler = pod == "default/other";
        let container = match filler {
            true => format!("filler-{number}-{count}"),
            false => reserved["container"].as_str().unwrap_or("c1").to_owned(),
        };
        let interface = reserved["ifname"].as_str().unwrap_or("net1");
        let who = Attachment::new(&container).interface(interface);
        let who = if filler { who } else { who.pod(pod) };
        let who = match container.strip_suffix("-ctr") {
            Some(node) => who.node(node),
            None => who,
        };
        let range = range_of(&config["ipam"], at);
        let one = json!({"range": range, "range_start": at, "range_end": at});
        let mut one = network("whereabouts", one);
        one["name"].clone_from(&config["name"]);
        let given = place.add(&who, &one).address();
        assert!(given.starts_with(&format!("{at}/")), "{given} is not {at}");
        if at == last {
            break;
        }
        at = next(at);
        count += 1;
    }
}

fn range_of(ipam: &Value, address: IpAddr) -> String {
    let ranges = ipam["ipRanges"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|entry| &entry["range"]);
    let all: Vec<&str> = std::iter::once(&ipam["range"])
        .chain(ranges)
        .filter_map(Value::as_str)
        .collect();
    let lies_in = |range: &&&str| {
        let network: Result<ipnetwork::IpNetwork, _> = range.rsplit('-').next().unwrap().parse();
        network.is_ok_and(|network| network.contains(address))
    };
    let found = all.iter().find(lies_in).unwrap_or(&all[0]);
    found.rsplit('-').next().unwrap().to_owned()
}

fn next(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(v4) => IpAddr::V4((v4.to_bits() + 1).into()),
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() + 1).into()),
    }
}

/// How the codes of the file read in our errors: code and a part of the text.
fn error_of(code: &str) -> (u64, &'static str) {
    match code {
        "EXCLUDE_PARSE" => (7, "exclude["),
        "POOL_EXHAUSTED" => (102, "is exhausted"),
        "SUBNET_TOO_SMALL" => (7, "no address between"),
        "INVALID_CIDR" => (7, "is not a CIDR"),
        "RANGE_START_OUTSIDE" => (7, "does not lie in"),
        "GATEWAY_INVALID" => (7, "gateway"),
        "CNI_VERSION_SINGLE_IP" => (1, "0.2.0 is not supported"),
        other => panic!("no reading for {other}"),
    }
}

fn check_error(run: Run, answer: &Answer, code: &str, vector: &Value) -> Result<(), String> {
    if answer.ok() {
        return Err(format!("no error but {}", answer.document));
    }
    let (mut number, mut part) = error_of(code);
    if code == "INVALID_CIDR" && vector["request"]["cni_args"].is_string() {
        (number, part) = (4, "CNI_ARGS IP");
    }
    // Without an agent it is not known whether others have free addresses.
    if run.store == StoreKind::Kubernetes && code == "POOL_EXHAUSTED" {
        (number, part) = (11, "this node's addresses are used up");
    }
    let (got, text) = answer.error();
    match got == number && text.contains(part) {
        true => Ok(()),
        false => Err(format!("wanted {number} {part:?}, got {got} {text}")),
    }
}

/// What this profile expects: ours where listed, else the file's.
fn expectation(vector: &Value, profile: Profile) -> (Value, Option<Ours>) {
    let id = vector["id"].as_str().unwrap();
    if let Some((.., ours, _)) = OTHERWISE
        .iter()
        .find(|(of, p, ..)| *of == id && *p == profile)
    {
        return (vector["expect"].clone(), Some(*ours));
    }
    if profile == Compatible {
        return (vector["expect"].clone(), None);
    }
    let recommended = vector
        .get("recommended")
        .cloned()
        .unwrap_or_else(|| vector["expect"].clone());
    let Some(policy) = recommended["policy"].as_str() else {
        return (recommended, None);
    };
    // Recommendations in words.
    let ours = match id {
        _ if policy.starts_with("reject") => Ours::Refused,
        "v055" => Ours::Address("192.168.2.2/24"),
        "v072" => Ours::Address("10.5.0.100/24"),
        "v074" => Ours::Address("10.5.0.1/24"),
        "v086" => {
            return (
                json!({"enable_overlapping_ranges": false, "ranges": vector["expect"]["ranges"]}),
                None,
            );
        }
        "v101" => Ours::Address("192.168.1.1/24"),
        "v220" => Ours::Address("192.168.1.2/24"),
        _ => panic!("{id}: no reading for {policy:?}"),
    };
    (vector["expect"].clone(), Some(ours))
}

fn requester(vector: &Value) -> Attachment {
    let request = &vector["request"];
    let text = |key: &str, default: &str| request[key].as_str().unwrap_or(default).to_owned();
    Attachment::new(&text("container", "c1"))
        .pod(&format!("default/{}", text("podname", "pod1")))
        .interface(&text("ifname", "net1"))
        .args(&text("cni_args", ""))
}

fn one_add(vector: &Value, run: Run) -> Result<(), String> {
    let place = place(run, vector.get("flat_file").filter(|flat| !flat.is_null()));
    let config = &vector["config"];
    for (number, reserved) in vector["reserved"].as_array().unwrap().iter().enumerate() {
        reserve(&place, config, reserved, number);
    }
    let mut who = requester(vector);
    if who.container == "nodeB-ctr" {
        who = who.node("nodeB");
    }
    let answer = place.add(&who, config);
    let (expect, ours) = expectation(vector, run.profile);
    match ours {
        Some(Ours::Refused) => match answer.ok() {
            true => return Err(format!("not refused but {}", answer.document)),
            false => {
                return if answer.error().0 == 7 {
                    Ok(())
                } else {
                    Err(format!("{answer:?}"))
                };
            }
        },
        Some(Ours::Address(address)) => return same(&answer, &[address]),
        _ => {}
    }
    if let Some(code) = expect["error"].as_str() {
        return check_error(run, &answer, code, vector);
    }
    if let Some(ranges) = expect["ranges"].as_array() {
        return config_as_read(&place, vector, &answer, &expect, ranges);
    }
    let addresses: Vec<&str> = match expect["addresses"].as_array() {
        Some(list) => list.iter().map(|a| a.as_str().unwrap()).collect(),
        None => vec![expect["address"].as_str().unwrap()],
    };
    same(&answer, &addresses)
}

fn same(answer: &Answer, addresses: &[&str]) -> Result<(), String> {
    match answer.ok() && answer.addresses() == addresses {
        true => Ok(()),
        false => Err(format!("wanted {addresses:?}, got {answer:?}")),
    }
}

/// A configuration that loads: what of it can be seen from outside.
fn config_as_read(
    place: &Place,
    vector: &Value,
    answer: &Answer,
    expect: &Value,
    ranges: &[Value],
) -> Result<(), String> {
    if !answer.ok() {
        return Err(format!("{answer:?}"));
    }
    let ip = &answer.document["ips"][0];
    if ip["gateway"] != expect["gateway"] {
        return Err(format!(
            "gateway {} instead of {}",
            ip["gateway"], expect["gateway"]
        ));
    }
    let shared = !place
        .files("")
        .iter()
        .any(|path| path.to_str().unwrap().matches('+').count() > 1);
    if shared != expect["enable_overlapping_ranges"].as_bool().unwrap() {
        return Err(format!("one space for overlapping ranges: {shared}"));
    }
    let range = &ranges[0];
    if let Some(last) = range["range_end"].as_str() {
        // From the last address on there is one, and then none.
        let mut narrowed = vector["config"].clone();
        let (start, length) = (
            range["range_start"].as_str().unwrap(),
            range["range"].as_str().unwrap(),
        );
        let length = length.split_once('/').unwrap().1;
        narrowed["ipam"]["range"] = json!(format!("{last}-{last}/{length}"));
        let first = same(answer, &[&format!("{start}/{length}")]);
        let who = Attachment::new("last");
        return first.and(same(
            &place.add(&who, &narrowed),
            &[&format!("{last}/{length}")],
        ));
    }
    Ok(())
}

/// The window's first and last address, by giving them out.
fn bounds(vector: &Value, run: Run) -> Result<(), String> {
    let place = place(run, None);
    let config = |start: Option<&str>| {
        let mut ipam = vector["config"].clone();
        if let Some(start) = start {
            ipam["range_start"] = json!(start);
        }
        network("whereabouts", ipam)
    };
    let (expect, ours) = expectation(vector, run.profile);
    let first = place.add(&Attachment::new("first"), &config(None));
    let window = match (ours, expect["error"].as_str()) {
        (Some(Ours::Refused), _) => {
            return if first.error().0 == 7 {
                Ok(())
            } else {
                Err(format!("{first:?}"))
            };
        }
        (Some(Ours::Window(first, last)), _) => (first, last),
        (_, Some(code)) => return check_error(run, &first, code, vector),
        _ => (
            expect["first"].as_str().unwrap(),
            expect["last"].as_str().unwrap(),
        ),
    };
    let bare = |answer: &Answer| answer.address().split_once('/').unwrap().0.to_owned();
    if bare(&first) != window.0 {
        return Err(format!("first is {}", bare(&first)));
    }
    let mut from_last = vector["config"].clone();
    from_last["range_start"] = json!(window.1);
    // An end that is not a bound of this window would be one for the new start.
    let end = from_last["range_end"]
        .as_str()
        .and_then(|end| end.parse::<IpAddr>().ok());
    if end.is_some_and(|end| end.to_string() != window.1) {
        from_last["range_end"] = json!(null);
    }
    let from_last = network("whereabouts", from_last);
    if window.0 != window.1 {
        let last = place.add(&Attachment::new("last"), &from_last);
        if bare(&last) != window.1 {
            return Err(format!("last is {}", bare(&last)));
        }
    }
    let beyond = place.add(&Attachment::new("beyond"), &from_last);
    check_error(run, &beyond, "POOL_EXHAUSTED", vector)
}

fn sequence(vector: &Value, run: Run) -> Result<(), String> {
    let place = place(run, None);
    let config = network("whereabouts", vector["config"].clone());
    for (number, reserved) in vector["reserved"].as_array().unwrap().iter().enumerate() {
        reserve(&place, &config, reserved, number);
    }
    let steps = vector["sequence"].as_array().unwrap();
    let (_, ours) = expectation(vector, run.profile);
    let mut adds = 0;
    for (number, step) in steps.iter().enumerate() {
        let text = |key: &str| step[key].as_str().unwrap();
        let who = Attachment::new(text("container"))
            .pod(&format!("default/{}", text("pod")))
            .interface(text("ifname"));
        let mut ipam = vector["config"].clone();
        for (key, value) in step["config"].as_object().unwrap() {
            ipam[key] = value.clone();
        }
        let answer = place.call(text("op"), &who, &network("whereabouts", ipam));
        let last = number + 1 == steps.len();
        match (step["expect"]["address"].as_str(), ours) {
            (Some(_), Some(Ours::Each(addresses))) => {
                same(&answer, &[addresses[adds]])?;
                adds += 1;
            }
            (Some(_), Some(Ours::Address(address))) if last => same(&answer, &[address])?,
            (Some(address), _) => same(&answer, &[address])?,
            (None, _) if answer.ok() && answer.document.is_null() => {}
            (None, _) => return Err(format!("step {number}: {answer:?}")),
        }
    }
    let leaks = vector["expect"].get("leaked").is_some() || matches!(ours, Some(Ours::Leaked));
    match leaks && !place.held().is_empty() {
        true => Err(format!("leaked {:?}", place.held())),
        false => Ok(()),
    }
}

/// Vectors that are about an inner function of whereabouts, and why no input of
/// ours reaches the like.
const OMITTED: [(&str, &str); 9] = [
    ("v126", "no network begins at the base and has the address"),
    (
        "v127",
        "an offset counts from the network's address, which is its lowest",
    ),
    ("v132", "no network begins at the base"),
    ("v133", "no network begins at the base"),
    ("v134", "an address of the other family is never an offset"),
    ("v135", "an address of the other family is never an offset"),
    (
        "v136",
        "the base is no network address; upstream's answer is wrong",
    ),
    ("v138", "upstream's answer is another address' number"),
    ("v209", "a pool of a node's slice is nobody's here"),
];

/// The number by which a pool's object names an address, as it is read.
fn offset(vector: &Value, _: Run) -> Result<(), String> {
    let get = |key: &str| {
        let text = vector["config"][key].as_str().unwrap();
        text.parse::<IpAddr>().unwrap()
    };
    if OMITTED.iter().any(|(id, _)| vector["id"] == *id) {
        return Ok(());
    }
    let (ip, base) = (get("ip"), get("base"));
    let longest = if ip.is_ipv4() { 32 } else { 128 };
    let range = (0..longest - 1)
        .rev()
        .map(|length| ipnetwork::IpNetwork::new(base, length).unwrap())
        .find(|range| range.network() == base && range.contains(ip))
        .unwrap();
    let offset = vector["expect"]["offset"].as_str().unwrap();
    let read = ipam::whereabouts::address(range, offset.parse().unwrap());
    match read == Some(ip) {
        true => Ok(()),
        false => Err(format!("{offset} from {range} is {read:?}")),
    }
}

/// The names of objects.
fn object_name(vector: &Value, _: Run) -> Result<(), String> {
    use ipam::whereabouts::{pool_name, reservation_name};
    if OMITTED.iter().any(|(id, _)| vector["id"] == *id) {
        return Ok(());
    }
    let config = &vector["config"];
    let network_name = config["network_name"].as_str();
    let name = match (config["range"].as_str(), config["ip"].as_str()) {
        (Some(range), _) => pool_name(range.parse().unwrap(), network_name),
        (None, ip) => reservation_name(ip.unwrap().parse().unwrap(), network_name),
    };
    match vector["expect"]["name"] == name {
        true => Ok(()),
        false => Err(name),
    }
}

/// What a reconciler frees: with us, what has no sandbox any more. A pod's entry
/// lives if the pod does and, once it has a status, if the status shows it.
fn reconcile(vector: &Value, run: Run) -> Result<(), String> {
    let place = place(run, None);
    let directory = place.path().join("netns");
    std::fs::create_dir(&directory).unwrap();
    let config = network("whereabouts", json!({"range": vector["config"]["range"]}));
    let pods = vector["config"]["pods"].as_array().unwrap();
    let mut over = Vec::new();
    for (number, reserved) in vector["reserved"].as_array().unwrap().iter().enumerate() {
        let netns = directory.join(number.to_string());
        std::fs::write(&netns, "").unwrap();
        // Two entries of one pod are two sandboxes of it, by different interfaces here.
        let who = Attachment::new(&format!("c{number}"))
            .pod(reserved["pod"].as_str().unwrap())
            .interface(&format!("net{number}"))
            .netns(&netns);
        let given = place.add(&who, &config).address();
        assert_eq!(given.split('/').next(), reserved["ip"].as_str());
        let lives = pods.iter().any(|pod| {
            let shown = pod["status_ips"].as_array().unwrap();
            pod["name"] == reserved["pod"] && (shown.is_empty() || shown.contains(&reserved["ip"]))
        });
        if !lives {
            over.push(netns);
        }
    }
    for netns in over {
        std::fs::remove_file(netns).unwrap();
    }
    crate::admin::age_all(&place, 120);
    place.reclaim(&[]);
    crate::admin::see_earlier(&place);
    let report = place.reclaim(&["--json"]).document;
    let (expect, ours) = expectation(vector, run.profile);
    let wanted = match ours {
        Some(Ours::Kept) => json!([]),
        _ => expect["freed"].clone(),
    };
    let freed = json!(crate::admin::freed(&report));
    if freed == wanted {
        Ok(())
    } else {
        Err(format!("freed {freed} instead of {wanted}"))
    }
}

/// Runs every vector of the kinds; answers how many.
fn run(kinds: &[&str], one: impl Fn(&Value, Run) -> Result<(), String> + Sync) -> usize {
    // What is read of objects has nothing to do with a store.
    let stores: &[StoreKind] = match kinds {
        ["offset" | "pool-name"] => &[StoreKind::File],
        _ => &[StoreKind::File, StoreKind::Kubernetes],
    };
    let all = vectors();
    let chosen: Vec<&Value> = all
        .iter()
        .filter(|v| kinds.contains(&v["kind"].as_str().unwrap()))
        .collect();
    let mut failures = Vec::new();
    for vector in &chosen {
        for (profile, store) in [Compatible, Strict]
            .into_iter()
            .flat_map(|profile| stores.iter().map(move |store| (profile, *store)))
        {
            let run = Run { profile, store };
            if let Err(why) = one(vector, run) {
                failures.push(format!(
                    "{} {run:?} {}: {why}",
                    vector["id"], vector["name"]
                ));
            }
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {}:\n{}",
        failures.len(),
        chosen.len(),
        failures.join("\n")
    );
    chosen.len()
}

#[test]
fn addresses_are_chosen_as_the_vectors_say() {
    assert_eq!(run(&["whereabouts"], one_add), 60);
}

#[test]
fn configurations_are_read_as_the_vectors_say() {
    assert_eq!(run(&["whereabouts-config"], one_add), 16);
}

#[test]
fn windows_are_those_of_the_vectors() {
    assert_eq!(run(&["bounds"], bounds), 15);
}

#[test]
fn sequences_of_calls_end_as_the_vectors_say() {
    assert_eq!(run(&["sequence"], sequence), 7);
}

/// In a store that splits ranges between nodes, blocks do it.
#[test]
fn the_size_of_a_slice_has_no_effect() {
    let sliced = json!({"range": "10.0.0.0/24", "node_slice_size": "/26"});
    for kind in ["rdma-ipam", "whereabouts"] {
        let (place, config) = (Place::new(), network(kind, sliced.clone()));
        for (node, address) in [("n1", "10.0.0.1/24"), ("n2", "10.0.0.2/24")] {
            let added = place.add(&Attachment::new(node).node(node), &config);
            assert_eq!(added.address(), address);
            assert!(added.stderr.contains("node_slice_size"), "{}", added.stderr);
        }
    }
}

#[test]
fn offsets_of_whereabouts_are_understood_as_the_vectors_say() {
    assert_eq!(run(&["offset"], offset), 10);
}

#[test]
fn names_of_whereabouts_are_understood_as_the_vectors_say() {
    assert_eq!(run(&["pool-name"], object_name), 7);
}

#[test]
fn leases_are_reclaimed_as_the_vectors_say() {
    assert_eq!(run(&["reconcile"], reconcile), 5);
}

#[test]
fn no_vector_is_passed_over() {
    let kinds = [
        "whereabouts",
        "whereabouts-config",
        "bounds",
        "sequence",
        "slices",
        "slice-assign",
        "offset",
        "pool-name",
        "reconcile",
    ];
    let all = vectors();
    assert!(
        all.iter()
            .all(|v| kinds.contains(&v["kind"].as_str().unwrap()))
    );
    for (id, reason) in OTHERWISE
        .iter()
        .map(|(id, _, _, reason)| (id, reason))
        .chain(OMITTED.iter().map(|(id, reason)| (id, reason)))
    {
        assert!(
            !reason.is_empty() && all.iter().any(|v| v["id"] == *id),
            "{id} is no vector"
        );
    }
}
