"""The page of `semel ui`: what `semel inspect` and `semel doctor` tell, in a browser, live."""
