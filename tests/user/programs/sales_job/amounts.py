import json


def with_vat(value):
    order = json.loads(value)
    order["vat"] = order["amount"] * 19
    return json.dumps(order)
