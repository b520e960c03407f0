"""One file per aggregate; its name is the kind. A file ends with `AGGREGATE = <its class>`."""
