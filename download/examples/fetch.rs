//! The library without the program: fetches what its first argument names into the folder that is its second, with the
//! number of connections that is its third and the SHA-256 that is its fourth, if they are given.
#![allow(clippy::print_stdout, reason = "the path is the result")]

use download::progress::Silent;
use download::{Destination, Digest, Downloader, Reference, Request, Settings};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let what = arguments.next().ok_or("usage: fetch WHAT FOLDER [CONNECTIONS [SHA256]]")?;
    let folder = arguments.next().ok_or("the second argument is a folder")?;
    let mut settings = Settings::from_environment()?;
    if let Some(connections) = arguments.next() {
        settings.connections = connections.parse()?;
    }
    let request = Request {
        reference: Reference::parse(&what)?,
        include: Vec::new(),
        exclude: Vec::new(),
        destination: Destination::Folder(folder.into()),
        sha256: arguments.next().as_deref().and_then(Digest::from_hex),
    };
    let downloader = Downloader::new(settings)?;
    let plan = downloader.plan(&request, &Silent)?;
    println!("{}", downloader.fetch(&plan, &Silent)?.place.display());
    Ok(())
}
