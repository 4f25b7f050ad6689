"""The lmdeploy 0.18.0 adapter. `apply` is entered by the start-up hook; nothing here runs unless it is on."""
