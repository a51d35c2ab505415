//! The support library keeps its own promises about namespaces.

use anyhow::Result;
use e2e::case;
use e2e::harness::Case;
use e2e::netns::Netns;

pub(crate) const CASES: &[Case] = &[case!(a_namespace_is_a_host_of_its_own, Root, Netns)];

/// What `/sys` shows to a program inside is what is inside.
fn a_namespace_is_a_host_of_its_own() -> Result<()> {
    let host = Netns::new("self")?;
    host.ip("link add up0 type veth peer name up1")?;
    let seen = e2e::netns::run(host.command("ls").arg("/sys/class/net"))?;
    let mut seen: Vec<_> = seen.split_whitespace().collect();
    seen.sort_unstable();
    assert_eq!(seen, ["lo", "up0", "up1"]);

    let path = host.path().to_path_buf();
    drop(host);
    assert!(!path.exists(), "{} is left behind", path.display());
    Ok(())
}
